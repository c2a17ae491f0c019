"""Whole models on the running CPU: dsmp's plans against eager, torch.compile, autocast and weight quantisation.

    python -m bench.cpu [--models linears,resnet18,mobilenet_v3_large,bert,decoder] [--threads 1,2] [--rounds 12]
                        [--rows 1,4,16,128] [--batches 1,8] [--layers N] [--skip-bf16] [--json FILE]

Each variant has a process; they are called in turn (bench/interleaved.py). With one thread a time is that thread's
processor time, which other work hardly changes; with more it is wall time, and means something on an idle machine only:
the load before and after is in the table's title. Columns:

    x compile    the median over rounds of torch.compile's time in fp32 over this one's
    x best fp32  the same over the fastest variant of full precision (for linears our own fp32 kernel is one)
    spread       the range of the middle half of the rounds over the median
    drift        relative 2-norm distance of the output from eager's in fp32
    weights MB   parameters and buffers, and what was packed of them; `peak MB` the peak of resident memory while it is
                 called (all cases of linears), over that of the process without a model
    compile s    the first call less the second, from empty caches; `x` is that over torch.compile's in fp32
    same code    Inductor made the same code as of torch.compile in fp32, comments apart: such rows differ as two
                 processes do that run one program

A plan holds the fp32 parameters beside what is packed of them. Plans are made once, before anything is timed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from bench.cpu_models import GROUPS, NAMES, Sizes, Workload, workload
from bench.cpu_variants import BASELINE, EAGER, FP32, TORCHAO_NOTE, WIDE, Variant, make_plan, names_of
from bench.interleaved import Measured, VariantError, Worker, measure
from bench.table import Row, save, show
from dsmp.codegen.cpu.extension import cpu_operators

SLOWER = 0.97
"""A ratio to torch.compile below this is reported."""


class Planned:
    """Plans of a workload, by variant and case, made at their first use in a process that ends then."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self._folder, self._sizes = folder, sizes
        self._files: dict[tuple[str, str, str], Path] = {}
        self.formats: dict[tuple[str, str, str], str] = {}
        """What products are computed in, by workload, variant and case."""

    def variants(self, work: Workload, notes: list[str]) -> list[Variant]:
        """A variant for each budget that could be planned for; why others could not is added to the notes."""
        found = []
        for budget in work.budgets:
            name = f"dsmp {budget}"
            try:
                plans = tuple((title, self._plan(work, name, title, budget)) for title in work.cases)
            except VariantError as error:
                notes.append(f"{work.name}, {name}: left out, {error}")
                continue
            found.append(Variant(name=name, workload=work.name, sizes=self._sizes, plans=plans))
        return found

    def _plan(self, work: Workload, name: str, title: str, budget: str) -> Path:
        key = (work.name, name, title)
        if key not in self._files:
            file = self._folder / f"{len(self._files)}.json"
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                self.formats[key] = pool.submit(make_plan, work.name, self._sizes, title, budget, file).result()
            self._files[key] = file
            print(f"{work.name}, {title}, {name}: {self.formats[key]}", flush=True)
        return self._files[key]


def started(work: Workload, variants: Sequence[Variant], threads: int, notes: list[str]) -> dict[str, Worker]:
    """Processes of the variants that could be made; why others could not is added to the notes."""
    workers = {}
    for variant in variants:
        try:
            worker = workers[variant.name] = Worker(variant, threads)
        except VariantError as error:
            notes.append(f"{work.name}, {variant.name}: left out, {error}")
            continue
        taken = ", ".join(f"{compile_s:.1f}" for _, compile_s, _, _ in worker.made.values())
        print(f"{work.name}, {threads} threads, {variant.name}: compiled in {taken} s", flush=True)
    return workers


def measured(workers: Mapping[str, Worker], titles: Sequence[str], rounds: int) -> dict[str, dict[str, Measured]]:
    """Figures by case and variant; ends the processes."""
    times = {title: measure(workers, title, baseline=BASELINE, rounds=rounds) for title in titles}
    peaks = {name: worker.close() for name, worker in workers.items()}
    found: dict[str, dict[str, Measured]] = {}
    for title in titles:
        found[title] = {}
        for name, worker in workers.items():
            output, compile_s, weights_mb, code = worker.made[title]
            found[title][name] = Measured(
                times=times[title][name], output=torch.from_numpy(output), compile_s=compile_s, weights_mb=weights_mb,
                peak_mb=peaks[name], code=code,
            )  # fmt: skip
    return found


def rows_of(work: Workload, found: Mapping[str, Mapping[str, Measured]], threads: int, load: str) -> Iterator[Row]:
    """A line for each case and variant."""
    for title, variants in found.items():
        base, exact = variants[BASELINE], variants[EAGER].output
        best = min((m for name, m in variants.items() if name in FP32), key=lambda m: m.median)
        for name, m in variants.items():
            yield {
                "model": work.name,
                "case": title,
                "threads": threads,
                "variant": name,
                "ms": m.median * 1e3,
                "spread": m.spread,
                "x compile": m.times_as_fast_as(base),
                "x best fp32": m.times_as_fast_as(best),
                "drift": float((m.output - exact).norm() / exact.norm()),
                "weights MB": m.weights_mb,
                "peak MB": m.peak_mb,
                "compile s": m.compile_s,
                "x": m.compile_s / base.compile_s,
                "same code": bool(m.code) and m.code == base.code,
                "rounds": len(m.times),
                "load": load,
            }


def slower(rows: Sequence[Row], formats: Mapping[tuple[str, str, str], str]) -> list[str]:
    """A sentence for each row of ours that is slower than torch.compile in fp32."""
    return [
        f"slower than torch.compile: {r['model']}, {r['case']}, {r['threads']} threads, {r['variant']}: "
        f"{r['x compile']:.3g} times as fast ({formats.get(_key(r), 'all fp32')}"
        f"{', the same code' if r['same code'] else ''})"
        for r in rows
        if str(r["variant"]).startswith("dsmp") and float(r["x compile"]) < SLOWER
    ]


def overheads(rows: Sequence[Row]) -> list[str]:
    """What the backend adds to torch.compile's time of compiling where all stays fp32."""
    return [
        f"compile time over torch.compile's: {r['model']}, {r['case']}, {r['threads']} threads: "
        f"{float(r['x']) - 1:+.0%}"
        for r in rows
        if r["variant"] == WIDE
    ]


def _key(row: Row) -> tuple[str, str, str]:
    return str(row["model"]), str(row["variant"]), str(row["case"])


def run(
    models: Sequence[str], threads: Sequence[int], sizes: Sizes, *, rounds: int, bf16: bool, notes: list[str]
) -> list[Row]:
    """Rows of all models. What could not be run, compile times, and rows of ours that are too slow go to the notes."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        planned = Planned(Path(folder), sizes)
        for name in models:
            work = workload(name, sizes)
            plain = [Variant(name=n, workload=name, sizes=sizes) for n in names_of(work, bf16=bf16)]
            variants = [*plain, *planned.variants(work, notes)]
            for count in threads:
                workers = started(work, variants, count, notes)
                before = os.getloadavg()[0]
                found = measured(workers, list(work.cases), rounds)
                load = f"{before:.1f}-{os.getloadavg()[0]:.1f}"
                added = list(rows_of(work, found, count, load))
                for title in work.cases:
                    lines = [_short(r) for r in added if r["case"] == title]
                    show(f"{name}, {title}, {count} threads, load of the machine {load}", lines)
                rows += added
        notes += [*overheads(rows), *slower(rows, planned.formats)]
    return rows


def _short(row: Row) -> Row:
    """What of a row the title of its table does not say."""
    return {k: v for k, v in row.items() if k not in ("model", "threads", "case", "load")}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _models(text: str) -> list[str]:
    names = [name for part in text.split(",") for name in GROUPS.get(part, (part,))]
    if unknown := sorted(set(names) - set(NAMES)):
        raise argparse.ArgumentTypeError(f"no model {', '.join(unknown)}; there are {', '.join([*GROUPS, *NAMES])}")
    return names


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=_models, default="linears,resnet18,mobilenet_v3_large,bert,decoder")
    parser.add_argument("--threads", type=_numbers, default="1,2")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--rows", type=_numbers, default="1,4,16,128", help="of linears")
    parser.add_argument("--batches", type=_numbers, default="1,8", help="of images and BERT")
    parser.add_argument("--layers", type=int, help="of BERT and the decoder; default: all")
    parser.add_argument("--skip-bf16", action="store_true", help="without autocast, which is slow where bf16 is")
    parser.add_argument("-o", "--json", type=Path, dest="json_file")
    arguments = parser.parse_args(argv)
    verdict = cpu_operators()
    if not verdict.ok:
        print(verdict.reason)
    sizes = Sizes(rows=arguments.rows, batches=arguments.batches, layers=arguments.layers)
    notes = [TORCHAO_NOTE]
    rows = run(
        arguments.models, arguments.threads, sizes, rounds=arguments.rounds, bf16=not arguments.skip_bf16, notes=notes
    )  # fmt: skip
    if arguments.json_file is not None:
        save("Models on the CPU", rows, arguments.json_file)
    print(*notes, sep="\n")


if __name__ == "__main__":
    main()
