"""`phalanx plan`: predicts the resources and speed of a job on machines that are not available."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from phalanx.config.environment_variables import KERAS_BACKEND
from phalanx.config.keras_backends import BACKENDS

if TYPE_CHECKING:
    from phalanx.config.plan_request import PlanRequest
    from phalanx.planning.step_measurement import StepMeasurement

PLOTTED_MACHINES = 4096
DEFAULT_LATENCY_MS = 0.05
"""One-way TCP latency between two machines of a data center."""
DEFAULT_TIMEOUT_S = 600.0
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_LINK = re.compile(r"\s*([\d.]+)\s*([kmg]bit)(?:/?s)?\s*", re.I)
_REPLICAS, _DEVICES, _PROGRAM = "Replicas on machines", "One program on many devices", "Program"


class LinkType(click.ParamType):  # type: ignore[type-arg]
    """Parses a rate such as `10Gbit` as bits per second."""

    name = "link"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = _LINK.fullmatch(str(value))
        try:
            rate = float(found[1]) * _BITS[found[2].lower()] if found else 0.0
        except ValueError:
            rate = 0.0
        if not rate > 0:
            self.fail(f"{value!r} is not a link rate. Write a number with its unit: 100Mbit, 10Gbit.", param, ctx)
        return rate


def _option(group: str, *flags: str, **settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(*flags, panel=group, **settings)


@click.command(
    short_help="Predict how a job would run on other machines.",
    context_settings={"allow_interspersed_args": True, "ignore_unknown_options": False, "max_content_width": 110},
)
@_option(_REPLICAS, "--machines", type=click.IntRange(1, 65_536), metavar="N", help="Predict 1 to N machines.")
@_option(_REPLICAS, "--link", "bits_per_s", type=LinkType(), metavar="10Gbit", help="The network of each machine.")
@_option(
    _REPLICAS,
    "--latency",
    "latency_ms",
    type=click.FloatRange(min=0),
    default=DEFAULT_LATENCY_MS,
    show_default=True,
    metavar="MS",
    help="Latency of the network, one way, in milliseconds.",
)
@_option(
    _REPLICAS,
    "--workers-per-machine",
    "workers",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    metavar="N",
    help="Replicas on each machine, with an equal share of its cores.",
)
@_option(
    _REPLICAS,
    "--plot",
    "plot_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help=f"Write an SVG or PNG plot of 1 to {PLOTTED_MACHINES:,} machines.",
)
@_option(
    _DEVICES,
    "--topology",
    metavar="v5e:2x4",
    help="Compile the step for these devices: TPUs (v5e:2x4), GPUs of one host (h100:8), or a divided CPU (cpu:4). On "
    "JAX.",
)
@_option(_PROGRAM, "--backend", type=click.Choice(BACKENDS), help="Sets KERAS_BACKEND for the program.")
@_option(_PROGRAM, "-m", "module", is_flag=True, help="SCRIPT is the name of a module, as with `python -m`.")
@_option(
    _PROGRAM,
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=DEFAULT_TIMEOUT_S,
    show_default=True,
    metavar="S",
    help="Seconds within which the program must reach its fit() and take a few steps.",
)
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT [-- ARGS]...")
def plan(**options: Any) -> None:
    """Predict how a job would run on other machines.

    Runs SCRIPT here until its first fit() under a strategy, takes a few steps or compiles one, and ends it. No callback
    runs, and nothing is saved. Options of SCRIPT come after `--`.

    Examples:

    \b
        phalanx plan train.py --machines 64 --link 10Gbit
        phalanx plan train.py --machines 8 --link 10Gbit -- --batch-size 4096
        phalanx plan train.py --topology v5e:2x4
    """
    from phalanx.launcher.worker_program import check_script

    topology = options.pop("topology")
    on_machines = [options["machines"], options["bits_per_s"], options["plot_file"]]
    if (topology is None) == (on_machines == [None] * 3) or (topology is None and None in on_machines[:2]):
        raise click.UsageError("Say what to plan for: --machines 64 --link 10Gbit, or --topology v5e:2x4.")
    if not options["module"]:
        check_script(options["program"][0])
    if topology is None:
        plan_replicas(**options)
    else:
        of_program = ("program", "module", "backend", "timeout_s")
        plan_devices(topology, **{name: options[name] for name in of_program})


def plan_replicas(
    *,
    machines: int,
    bits_per_s: float,
    latency_ms: float,
    workers: int,
    plot_file: Path | None,
    **program: Any,
) -> None:
    """Measure the program's step and the software's costs, and show a prediction for 1 to `machines` machines."""
    from phalanx.planning.collective_costs import CollectiveCosts, Machines, NetworkLink
    from phalanx.planning.collective_trial import measure_costs
    from phalanx.planning.examined_program import MAX_REPLICAS
    from phalanx.planning.scaling import ScalingModel, machine_counts, measured_counts
    from phalanx.planning.scaling_report import check_plot, describe_costs, describe_measurement, plot, render_table

    if plot_file is not None:
        check_plot(plot_file)
    link = NetworkLink.of_ethernet(bits_per_s, latency_ms / 1e3)
    costs = CollectiveCosts(link, measure_costs(encrypted=machines > 1))
    most = max(machines, PLOTTED_MACHINES) if plot_file is not None else machines
    counts = {min(count * workers, MAX_REPLICAS) for count in (*measured_counts(machines), most)}
    measurements = [measure_step(count, workers, **program) for count in sorted(counts)]
    model = ScalingModel(measurements, costs)
    click.echo(describe_measurement(measurements[-1]))
    click.echo(describe_costs(costs))
    click.echo()
    click.echo(render_table([model.predict(Machines(count, workers)) for count in machine_counts(machines)]))
    if plot_file is not None:
        points = [model.predict(Machines(count, workers)) for count in machine_counts(most)]
        plot(points, machines, plot_file, f"{program['program'][0]}, links of {bits_per_s / 1e9:g} Gbit/s")
        click.echo(f"\nPlot: {plot_file}")


def measure_step(
    replicas: int, workers: int, *, program: Sequence[str], module: bool, backend: str | None, timeout_s: float
) -> StepMeasurement:
    """Measure the step of the program as one of `replicas` replicas, with `workers` replicas per machine."""
    from phalanx.config.environment import process_environment
    from phalanx.launcher.worker_environment import thread_settings
    from phalanx.planning.examined_program import examine
    from phalanx.planning.step_measurement import StepMeasurement
    from phalanx.runtime.core_affinity import host_shares

    share = host_shares(workers)[0]
    environment = {**thread_settings(share.threads), **process_environment()}
    if backend is not None:
        environment[KERAS_BACKEND] = backend
    what = f"one of {replicas:,} replicas" if replicas > 1 else "the only replica"
    click.echo(f"Measuring a step of {what} ...", err=True)
    with _request(replicas) as request:
        return examine(_command(program, module), request, StepMeasurement, environment, timeout_s, cores=share.cores)


def plan_devices(name: str, *, program: Sequence[str], module: bool, backend: str | None, timeout_s: float) -> None:
    """Let the program compile its step for a topology, and show what it requires of a device."""
    from phalanx.config.environment import process_environment
    from phalanx.planning.accelerators import check_compiler, parse_topology
    from phalanx.planning.examined_program import examine
    from phalanx.planning.program_measurement import ProgramMeasurement
    from phalanx.planning.program_report import render

    environment = process_environment()
    topology = parse_topology(name)
    check_compiler(topology, backend or environment.get(KERAS_BACKEND))
    click.echo(f"Compiling a step for {topology.name} ...", err=True)
    with _request(topology.devices, topology.name) as request:
        measured = examine(_command(program, module), request, ProgramMeasurement, environment, timeout_s)
    click.echo(render(measured, topology))


def _command(program: Sequence[str], module: bool) -> Sequence[str]:
    return ("-m", *program) if module else program


@contextmanager
def _request(replicas: int, topology: str = "") -> Iterator[PlanRequest]:
    from phalanx.config.plan_request import PlanRequest

    with tempfile.TemporaryDirectory(prefix="phalanx-plan-") as folder:
        yield PlanRequest(Path(folder) / "measurement.json", replicas, topology)
