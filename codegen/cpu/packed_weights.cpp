#include "packed_weights.h"

#include <c10/util/hash.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

#include "fingerprint.h"

namespace dsmp {
namespace {

struct Entry {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  int64_t version, fingerprint;
  std::shared_ptr<const Packed> made;
};

std::mutex mutex;
std::unordered_map<uint64_t, Entry> table;

// Of where a weight lies and how: two weights never share an entry that holds, as the fingerprint tells them apart.
uint64_t place(const at::Tensor& weight, int64_t kind) {
  size_t seed = c10::hash_combine(reinterpret_cast<uintptr_t>(weight.const_data_ptr()), kind);
  for (int64_t size : weight.sizes()) seed = c10::hash_combine(seed, size);
  for (int64_t stride : weight.strides()) seed = c10::hash_combine(seed, stride);
  return seed;
}

void drop_dead() {
  for (auto it = table.begin(); it != table.end();) it = it->second.storage.expired() ? table.erase(it) : std::next(it);
}

}  // namespace

std::shared_ptr<const Packed> packed_weight(const at::Tensor& weight, int64_t kind, const std::function<Packed()>& make) {
  if (weight.is_inference()) return std::make_shared<const Packed>(make());
  const uint64_t key = place(weight, kind);
  const int64_t version = weight._version(), sampled = fingerprint(weight);
  auto* storage = weight.storage().unsafeGetStorageImpl();
  {
    const std::lock_guard<std::mutex> guard(mutex);
    const auto found = table.find(key);
    if (found != table.end() && found->second.version == version && found->second.fingerprint == sampled &&
        found->second.storage._unsafe_get_target() == storage && !found->second.storage.expired())
      return found->second.made;
  }
  auto made = std::make_shared<const Packed>(make());
  auto alive = c10::intrusive_ptr<c10::StorageImpl>::unsafe_reclaim_from_nonowning(storage);
  const std::lock_guard<std::mutex> guard(mutex);
  drop_dead();
  table.insert_or_assign(key, Entry{c10::weak_intrusive_ptr<c10::StorageImpl>(alive), version, sampled, made});
  return made;
}

int64_t packed_bytes() {
  const std::lock_guard<std::mutex> guard(mutex);
  drop_dead();
  int64_t total = 0;
  for (const auto& [key, entry] : table)
    for (const at::Tensor& part : *entry.made) total += static_cast<int64_t>(part.nbytes());
  return total;
}

void forget_packed() {
  const std::lock_guard<std::mutex> guard(mutex);
  table.clear();
}

}  // namespace dsmp

TORCH_LIBRARY_FRAGMENT(dsmp_cpu, m) {
  m.def("packed_bytes() -> int", dsmp::packed_bytes);
  m.def("forget_packed() -> ()", dsmp::forget_packed);
}
