#include "int8_weights.h"

#include <ATen/ops/empty.h>
#include <c10/util/hash.h>

#include <mutex>
#include <unordered_map>

#include "fingerprint.h"
#include "int8_kernels.h"

namespace dsmp_int8 {
namespace {

struct Entry {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  int64_t version, fingerprint;
  std::shared_ptr<const PackedWeight> made;
};

std::mutex mutex;
std::unordered_map<uint64_t, Entry> table;

// Of where a weight lies and how: two weights never share an entry that holds, as the fingerprint tells them apart.
uint64_t place(const at::Tensor& weight, int64_t groups) {
  size_t seed = c10::hash_combine(reinterpret_cast<uintptr_t>(weight.const_data_ptr()), groups);
  for (int64_t size : weight.sizes()) seed = c10::hash_combine(seed, size);
  for (int64_t stride : weight.strides()) seed = c10::hash_combine(seed, stride);
  return seed;
}

std::shared_ptr<const PackedWeight> make(const at::Tensor& weight, int64_t groups) {
  return std::make_shared<const PackedWeight>(pack_weight(weight, groups));
}

void drop_dead() {
  for (auto it = table.begin(); it != table.end();) it = it->second.storage.expired() ? table.erase(it) : std::next(it);
}

void check(const at::Tensor& weight) {
  TORCH_CHECK(weight.dim() >= 2 && weight.numel() > 0 && weight.scalar_type() == at::kFloat && weight.is_cpu(),
              "int8 weights are packed from fp32 ones on a CPU with at least 2 axes and a number in them");
}

}  // namespace

PackedWeight pack_weight(const at::Tensor& weight, int64_t groups) {
  check(weight);
  const at::Tensor w = weight.contiguous();
  const int64_t out = w.size(0), per_group = w.size(1), area = w.numel() / out / per_group;
  const PackedWeight made{at::empty({Layout(out, per_group, area, groups).size}, at::kChar),
                          at::empty({out}, at::kFloat), at::empty({out}, at::kInt)};
  pack(w.const_data_ptr<float>(), out, per_group, area, groups, made.payload.mutable_data_ptr<int8_t>(),
       made.scales.mutable_data_ptr<float>(), made.sums.mutable_data_ptr<int32_t>());
  return made;
}

std::shared_ptr<const PackedWeight> packed_weight(const at::Tensor& weight, int64_t groups) {
  check(weight);
  if (weight.is_inference()) return make(weight, groups);
  const uint64_t key = place(weight, groups);
  const int64_t version = weight._version(), sampled = dsmp::fingerprint(weight);
  auto* storage = weight.storage().unsafeGetStorageImpl();
  {
    const std::lock_guard<std::mutex> guard(mutex);
    const auto found = table.find(key);
    if (found != table.end() && found->second.version == version && found->second.fingerprint == sampled &&
        found->second.storage._unsafe_get_target() == storage && !found->second.storage.expired())
      return found->second.made;
  }
  auto made = make(weight, groups);
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
    total += static_cast<int64_t>(entry.made->payload.nbytes() + entry.made->scales.nbytes() + entry.made->sums.nbytes());
  return total;
}

void forget() {
  const std::lock_guard<std::mutex> guard(mutex);
  table.clear();
}

}  // namespace dsmp_int8
