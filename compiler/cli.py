"""The command line: `dsmp report`, `plan`, `diff`, `explain`, `pareto`, `kernels`, `audit`, `hardware`.

Exit codes: 0 success (for diff: equal), 1 plans differ, 2 any error, 130 interrupted, 141 the reader of the output went
away. Errors are one line on standard error; `--debug` shows where they came from.

This file loads no torch. The modules that do the work are imported when a command runs, so help and usage errors come
at once, and plans are read without what only planning needs.
"""

from __future__ import annotations

import io
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InvalidOptionError
from .cli_mesh import Mesh, NodeName, Place, Sequences, Wire, Zero, mesh_arguments
from .cli_support import Debug, HardwareFiles, Json, errors, given, load
from .hardware.cli import hardware_app

PLAN_SUFFIX = ".json"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A numeric format for every node of a PyTorch model's forward and backward graph.",
)
app.add_typer(hardware_app, name="hardware")

Hardware = Annotated[
    str | None, typer.Option(metavar="H", help="Device to plan for, such as h800, or auto: the running one (default).")
]
HardwareList = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="H[,H...]",
        help="Device to plan for, such as h800, or auto: the running one (default). Several: plans side by side.",
    ),
]
Infer = Annotated[bool, typer.Option("--infer", help="Plan inference; default is the training step.")]
Inputs = Annotated[
    list[str] | None,
    typer.Option("--input", metavar="SPEC", help="Input tensor, such as float32[8,3,224,224] or int64[1,2048]<32000."),
]
Config = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Config of a transformers:CLASS, instead of its default one.")
]
Rules = Annotated[
    list[str] | None,
    typer.Option("--rule", metavar="GLOB=FORMAT", help="Force the format of nodes by key; the last match wins."),
]
Calibrate = Annotated[
    str | None,
    typer.Option(metavar="FILE.py:NAME", help="Batches to measure on: a list, or a function that returns one."),
]
LossCode = Annotated[
    str | None,
    typer.Option("--loss", metavar="FILE.py:NAME", help="loss(output, target); batches are then (inputs, target)."),
]
BudgetText = Annotated[
    str | None,
    typer.Option("--budget", metavar="B", help="What the plan may cost, such as 0.5%: of the loss or the outputs."),
]
Memory = Annotated[
    str | None, typer.Option(metavar="M", help="Limit of saved activations: 2GB, or 60% of what is saved as written.")
]
Drift = Annotated[
    str | None, typer.Option(metavar="D", help="How outputs are compared: kl, bernoulli or l2; default: by the model.")
]
CostModel = Annotated[
    str,
    typer.Option("--cost", metavar="C", help="roofline: the device's time; bits: multiplied bits."),
]
Untied = Annotated[bool, typer.Option("--untied", help="Let repeated blocks and q/k/v take different formats.")]
Draws = Annotated[int, typer.Option(metavar="N", help="Random cotangents for each calibration sample.")]
ScoresFile = Annotated[
    Path | None,
    typer.Option("--scores", metavar="FILE.json", help="What was measured before, instead of --calibrate."),
]
SaveScores = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Keep what was measured, for other devices and budgets.")
]
Use = Annotated[
    list[str] | None,
    typer.Option("--use", metavar="GLOB=NAME", help="Implementation for nodes by key; an error where it cannot serve."),
]
Without = Annotated[
    list[str] | None, typer.Option("--without", metavar="NAME", help="Implementation not to use; repeatable.")
]
MODEL_HELP = (
    "torchvision:NAME, timm:NAME, transformers:CLASS[,key=value...], module:factory, file.py:factory or archive.pt2"
)


def calibration_arguments(**options: Any) -> dict[str, Any]:
    """The calibration options that were set to something else than their default."""
    defaults = {"cost": "roofline", "draws": 2}
    return {name: value for name, value in options.items() if value and value != defaults.get(name)}


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dsmp {version('dsmp')}")
        raise typer.Exit


@app.callback()
def _callback(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options before the command."""


@app.command()
def report(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help=f"{MODEL_HELP}; a plan.json; nothing: a demonstration on a small GPT."),
    ] = None,
    hardware: HardwareList = None,
    infer: Infer = False,
    inputs: Inputs = None,
    match: Annotated[
        str | None, typer.Option(metavar="GLOB", help="Only nodes whose key or module path matches.")
    ] = None,
    phase: Annotated[str | None, typer.Option(metavar="P", help="Only fprop, dgrad, wgrad or bwd.")] = None,
    config: Config = None,
    every_node: Annotated[bool, typer.Option("--all", help="One row for every node, nothing folded.")] = False,
    as_json: Json = False,
    rules: Rules = None,
    calibrate: Calibrate = None,
    loss: LossCode = None,
    budget: BudgetText = None,
    memory: Memory = None,
    drift: Drift = None,
    cost: CostModel = "roofline",
    untied: Untied = False,
    draws: Draws = 2,
    scores: ScoresFile = None,
    save_scores: SaveScores = None,
    mesh: Mesh = None,
    node: NodeName = None,
    zero: Zero = None,
    sequence: Sequences = None,
    wire: Wire = None,
    place: Place = None,
    hardware_files: HardwareFiles = None,
    debug: Debug = False,
) -> None:
    """Show what is decided for each node of a model, and why; for several devices, side by side.

    GFLOP and µs of a folded row are sums over its nodes. With --json the output is the plan itself: redirected to a
    file it can be loaded again (with --match or --phase it holds the chosen nodes only). For several devices it is an
    object with all plans.
    """
    shown = {"match": match, "phase": phase, "every_node": every_node, "as_json": as_json}
    with errors(debug):
        calibration = calibration_arguments(
            calibrate=calibrate, loss=loss, budget=budget, memory=memory, drift=drift, cost=cost, untied=untied,
            draws=draws, scores=scores, save_scores=save_scores,
        )  # fmt: skip
        on_mesh = mesh_arguments(mesh, node=node, zero=zero, sequence=sequence, wire=wire, place=place)
        options = given(
            hardware=hardware, hardware_file=hardware_files, infer=infer, input=inputs, config=config, rule=rules,
            mesh=mesh, **calibration,
        )  # fmt: skip
        if model is None:
            useless = [o for o in options if not o.startswith("--hardware")]
            useless += given(match=match, phase=phase, all=every_node)
            if useless:
                raise InvalidOptionError(useless[0], "no MODEL", f"with a MODEL only: {MODEL_HELP}, or a plan.json")
            load("model_commands").demo(hardware, files=hardware_files or (), as_json=as_json, debug=debug)
        elif model.endswith(PLAN_SUFFIX):
            if options:
                raise InvalidOptionError(options[0], model, "with a model only, a plan has its decisions; leave it out")
            load("commands").report_file(Path(model), **shown)
        else:
            commands = load("model_commands")
            arguments = commands.ModelArguments(
                model=model, hardware=hardware, hardware_files=hardware_files or (), infer=infer, inputs=inputs or (),
                config=config, rules=rules or (), debug=debug, calibration=calibration, mesh=on_mesh,
            )  # fmt: skip
            commands.report_model(arguments, **shown)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PLAN.json", help="File to write; an old one is replaced at once.")
    ],
    hardware: Hardware = None,
    infer: Infer = False,
    inputs: Inputs = None,
    config: Config = None,
    rules: Rules = None,
    calibrate: Calibrate = None,
    loss: LossCode = None,
    budget: BudgetText = None,
    memory: Memory = None,
    drift: Drift = None,
    cost: CostModel = "roofline",
    untied: Untied = False,
    draws: Draws = 2,
    scores: ScoresFile = None,
    save_scores: SaveScores = None,
    mesh: Mesh = None,
    node: NodeName = None,
    zero: Zero = None,
    sequence: Sequences = None,
    wire: Wire = None,
    place: Place = None,
    hardware_files: HardwareFiles = None,
    debug: Debug = False,
) -> None:
    """Write the precision plan of a model, to review, edit and replay: options={"plan": "plan.json"}.

    With --calibrate the plan is chosen from measurements: the fastest formats that stay within --budget. With --mesh it
    says where every parameter lies, what every collective sends, and the time and memory of a rank; inputs given with
    --input are then those of the whole mesh.
    """
    with errors(debug):
        if model.endswith(PLAN_SUFFIX):
            raise InvalidOptionError("MODEL", model, "a model; this is a plan already, `dsmp report` shows it")
        calibration = calibration_arguments(
            calibrate=calibrate, loss=loss, budget=budget, memory=memory, drift=drift, cost=cost, untied=untied,
            draws=draws, scores=scores, save_scores=save_scores,
        )  # fmt: skip
        commands = load("model_commands")
        arguments = commands.ModelArguments(
            model=model, hardware=hardware, hardware_files=hardware_files or (), infer=infer, inputs=inputs or (),
            config=config, rules=rules or (), debug=debug, calibration=calibration,
            mesh=mesh_arguments(mesh, node=node, zero=zero, sequence=sequence, wire=wire, place=place),
        )  # fmt: skip
        commands.save_plan(arguments, output)


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="A plan.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Another plan.")],
    flat: Annotated[bool, typer.Option("--flat", help="Node by node instead of by module.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show where two plans differ, module by module. Exit code 0: nowhere, 1: somewhere."""
    with errors(debug):
        if load("commands").diff(before, after, flat=flat, as_json=as_json):
            raise typer.Exit(1)


@app.command()
def explain(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan.")],
    key: Annotated[
        str,
        typer.Argument(metavar="KEY", help="Key of a node, or a glob, beginning or module path that fits one node."),
    ],
    want: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Why not this one: fp8_e4m3, or fp8_e4m3:row/row.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say why a node got its format, what the best other one would change, and at which budget it would be chosen."""
    with errors(debug):
        load("plan_commands").explain(plan_file, key, want=want, as_json=as_json)


@app.command()
def pareto(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A calibrated plan.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Figure to write: .png, .svg or .pdf.")
    ] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="All points as CSV.")] = None,
    points: Annotated[int, typer.Option(metavar="N", help="At how many budgets to solve.")] = 24,
    debug: Debug = False,
) -> None:
    """Show predicted time against error over all budgets, with single formats, autocast and the device's tier."""
    with errors(debug):
        load("plan_commands").pareto(plan_file, output=output, csv_file=csv_file, points=points)


@app.command()
def kernels(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP}; or a plan.json")],
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="T", help="Instruction set, such as sm_90 or gfx942; default: the device's."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Folder for sources and machine code.")
    ] = None,
    hardware: Hardware = None,
    infer: Infer = False,
    inputs: Inputs = None,
    config: Config = None,
    rules: Rules = None,
    use: Use = None,
    without: Without = None,
    as_json: Json = False,
    hardware_files: HardwareFiles = None,
    debug: Debug = False,
) -> None:
    """Write the Triton kernels that a plan needs, compiled for a target, and show what their machine code is like.

    Needs no GPU. Kernels that differ in run-time sizes only are one.
    """
    with errors(debug):
        if model.endswith(PLAN_SUFFIX):
            useless = given(infer=infer, input=inputs, config=config, rule=rules)
            if useless:
                raise InvalidOptionError(useless[0], model, "with a model only, a plan has its decisions; leave it out")
        arguments = load("model_commands").ModelArguments(
            model=model, hardware=hardware, hardware_files=hardware_files or (), infer=infer, inputs=inputs or (),
            config=config, rules=rules or (), debug=debug,
        )  # fmt: skip
        commands = load("kernel_commands")
        choices = commands.Choices(use=use or (), without=without or ())
        commands.kernels(arguments, target=target, output=output, choices=choices, as_json=as_json)


@app.command()
def audit(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    hardware: Hardware = None,
    infer: Infer = False,
    inputs: Inputs = None,
    config: Config = None,
    rules: Rules = None,
    use: Use = None,
    without: Without = None,
    every_node: Annotated[bool, typer.Option("--all", help="One row for every node, nothing folded.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="A planned narrow node that would run wide is an error.")
    ] = False,
    as_json: Json = False,
    hardware_files: HardwareFiles = None,
    debug: Debug = False,
) -> None:
    """Show what runs on this machine for every planned node: the implementation; native, simulated or fallen back.

    Exit code 0: every node becomes what was planned, or is simulated for another device; 1: some fell back.
    """
    with errors(debug):
        arguments = load("model_commands").ModelArguments(
            model=model, hardware=hardware, hardware_files=hardware_files or (), infer=infer, inputs=inputs or (),
            config=config, rules=rules or (), debug=debug,
        )  # fmt: skip
        commands = load("kernel_commands")
        choices = commands.Choices(use=use or (), without=without or ())
        if not commands.audit(arguments, choices=choices, every_node=every_node, strict=strict, as_json=as_json):
            raise typer.Exit(1)


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without µ shows ? instead of failing
    app()
