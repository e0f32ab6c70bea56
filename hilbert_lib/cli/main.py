"""The `hilbert` command."""

# Each command imports what it needs of the suite, so that --help and list wait for neither torch nor pandas.
import json
import sys
import warnings
from collections import Counter
from pathlib import Path

import click

from hilbert_lib.cli.bench import bench
from hilbert_lib.cli.claims import claims
from hilbert_lib.cli.options import LOCAL, json_option, option, out_option, print_json, seconds, together, usage_errors
from hilbert_lib.cli.plan import plan
from hilbert_lib.cli.stop import Interrupted, interruptible
from hilbert_lib.files import one_line

EXISTING_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
SET = (
    "Set a parameter, in two words; repeatable. Lists: 1,2,4. In a sweep VALUE is all values, as 1,2,4; of lists "
    "'1,2;1,2,4'."
)
FILE = "Flat YAML file of parameters, or a folder with NAME.yaml for the notebook of that name; -p goes before it."


class Commands(click.Group):
    """Tells a stop, a warning, and what the disk refuses, in one line, whichever command they come from."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command that was asked for."""
        try:
            with interruptible(), warnings.catch_warnings():
                warnings.showwarning = lambda message, *_, **__: click.echo(f"warning: {one_line(message)}", err=True)
                return super().invoke(ctx)
        except Interrupted as stop:
            goes_on = ctx.invoked_subcommand in ("run", "sweep", "bench")
            advice = ": what has ended is kept, and the same command goes on from there" if goes_on else ""
            click.echo(f"{stop}{advice}", err=True)
            ctx.exit(stop.exit_status)
        except BrokenPipeError:  # click's own: whoever read the output has gone
            raise
        except OSError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hilbert-lib")
def main() -> None:
    """Run the notebooks, build their reports, compare their records, look at this machine.

    \b
    All of them, with a report to read:  hilbert run
    What there is to turn:               hilbert list
    Completion of words in bash:         eval "$(_HILBERT_COMPLETE=bash_source hilbert)"   (zsh_source, fish_source)
    """


for command in (bench, claims, plan):
    main.add_command(command)


def _texts(_context: click.Context, _option: click.Parameter, pairs: tuple[tuple[str, str], ...]) -> dict[str, str]:
    for name, times in Counter(name for name, _ in pairs).items():
        if "=" in name:
            raise click.UsageError(f"-p takes two words, as -p {name.replace('=', ' ', 1)}; got {name!r}")
        if times > 1:
            raise click.UsageError(f"-p {name} is given more than once; several values: hilbert sweep -p {name} A,B")
    return dict(pairs)


notebooks_option = click.option("--notebooks", "folder", type=EXISTING_FOLDER, help="Folder of the notebooks.")
running_options = together(
    click.option("-p", "texts", nargs=2, multiple=True, callback=_texts, metavar="NAME VALUE", help=SET),
    click.option("-f", "source", type=click.Path(exists=True, path_type=Path), help=FILE),
    out_option,
    notebooks_option,
    option("--timeout", type=seconds, default=3600, help="Seconds for one notebook; inf is no limit."),
    click.option("--force", is_flag=True, help="Run again what is finished, and from its beginning what is not."),
    click.option("--dry-run", is_flag=True, help="Only show the points, and how many."),
)


@main.command("list")
@notebooks_option
@json_option
def list_notebooks(folder: Path | None, as_json: bool) -> None:
    """Show every notebook, its title and its parameters.

    A parameter stands with its type, default and meaning; `hilbert run NAME -p PARAMETER VALUE` sets it.

    \b
    Example: hilbert list
    """
    from hilbert_lib.lab.suite.points import find_notebooks

    with usage_errors():
        notebooks = find_notebooks(folder)
    if as_json:
        print_json([notebook.facts() for notebook in notebooks])
        return
    for notebook in notebooks:
        click.secho(f"{notebook.name}  {notebook.title}", bold=True)
        for setting in notebook.settable.values():
            declaration = f"{setting.name}: {setting.annotation} = {setting.default!r}"
            click.echo(f"    {declaration:<48}  {setting.meaning}".rstrip())


@main.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@running_options
@option(
    "--compile-first",
    "compilers",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Before each run, N processes compute the cases of its sweeps once and share the compilation; 0 is none.",
)
def run(names: tuple[str, ...], **how) -> None:
    """Run notebooks, all of them without a NAME, and build their report.

    What is finished is reused, so that a call which was cut short goes on where it was. The last line is the path
    of the report's index page; the exit status is 1 if a notebook failed. Where there is no git repository,
    HILBERT_COMMIT and HILBERT_DIRTY (0 or 1) in the environment say which code runs.

    On a GPU most of a notebook's first run is compilation, kernel by kernel. With --compile-first N processes do it
    together: each case of a sweep is computed by one of them, neither checked nor timed nor recorded, a line a case.
    The run follows in one process, and finds compiled kernels in the caches on the disk. Several GPUs are taken in
    turn, unless CUDA_VISIBLE_DEVICES is set. What fails there is printed and costs nothing; --timeout counts both.

    \b
    Example: hilbert run 03_cache_lines -p dilation_rates 1,2,4
    Example: hilbert run -f notebooks/configs/h200 --out reports/h200
    Example: hilbert run 06c_options -f notebooks/configs/h200/06c_options.yaml --compile-first 16
    """
    run_folder, status = _run_points(names, **how)
    from hilbert_lib.lab.suite.report import write_index, write_report

    index = write_report(run_folder)
    write_index(run_folder.parent)
    click.echo(str(index))
    sys.exit(status)


@main.command()
@click.argument("name")
@click.option("--shard", metavar="I/N", default="1/1", help="Only every N-th point from the I-th on; I from 1 to N.")
@running_options
def sweep(name: str, **how) -> None:
    """Run one notebook at every combination of the values given.

    A point that fails does not end the others. NAME.csv in the run's folder is one table of all points, and what they
    measured where the notebook keeps measurements. Give each job of a scheduler's array its --shard; when all are done,
    `hilbert report` builds the pages.

    \b
    Example: hilbert sweep 02_dilated_attention -p head_dim 16,64 -p is_causal false,true --shard 1/2
    """
    run_folder, status = _run_points([name], **how)
    from hilbert_lib.lab.suite.report import write_table

    click.echo(f"the table: {write_table(run_folder, Path(name).name.removesuffix('.ipynb'))}")
    click.echo(f"the pages: hilbert report {run_folder}")
    sys.exit(status)


def _run_points(names, folder, texts, source, out, dry_run, shard="", **how) -> tuple[Path, int]:
    """Run the points: the run's folder and the exit status. A dry run lists them and ends the command."""
    from hilbert_lib.lab.suite.points import find_notebooks, left_out, make_points, say_values, take_shard

    with usage_errors():
        notebooks = find_notebooks(folder, names)
        all_points = []
        for notebook in notebooks:
            all_points += make_points(notebook, texts, source, is_sweep=bool(shard))
        points = take_shard(all_points, shard or "1/1")
    if dry_run:
        for point in points:
            click.echo(f"{point.name}  {say_values(point.changes) or 'with its defaults'}")
        click.echo(f"{len(points)} of {len(all_points)} to run")
        sys.exit(0)
    import hilbert_lib.lab.suite.report  # noqa: F401 - where its pages miss a package, it fails before anything runs
    from hilbert_lib.lab.environment import environment
    from hilbert_lib.lab.suite.folders import run_id
    from hilbert_lib.lab.suite.run import run_points
    from hilbert_lib.machine import prepare_kernels

    with usage_errors():
        prepare_kernels()
        facts = environment()
    run_folder = out / run_id(facts)
    missed = left_out(points)
    _warn(missed)
    try:
        outcomes = run_points(points, run_folder, facts, **how)
    finally:
        _warn(missed)  # once more: a long run's first lines may be out of sight
    failed = [name for name, outcome in outcomes.items() if outcome == "failed"]
    summary = ", ".join(f"{count} {outcome}" for outcome, count in Counter(outcomes.values()).items())
    click.echo(f"{len(points)} runs: {summary}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return run_folder, 1 if failed else 0


def _warn(lines: list[str]) -> None:
    for line in lines:
        click.echo(line, err=True)


@main.command()
@click.argument("folder", type=EXISTING_FOLDER, default=LOCAL)
@click.option("--redraw", is_flag=True, help="Draw the figures again from their data.")
def report(folder: Path, redraw: bool) -> None:
    """Build the pages of one run, or of every run in FOLDER (reports/local), without running anything.

    They lie beside the runs; `make pages` builds those of the committed runs elsewhere. The last line is the index of
    all.

    \b
    Example: hilbert report reports/local --redraw
    """
    from hilbert_lib.lab.suite.report import find_runs, write_index, write_report

    with usage_errors():
        runs = find_runs(folder)
    root = folder
    if folder in runs:
        (*runs, root) = folder.resolve(), folder.resolve().parent  # `..` and links mean what they mean to the system
    if redraw:
        from hilbert_lib.lab.figures import redraw as redraw_figures

        click.echo(f"{len(redraw_figures(folder))} figures redrawn")
    for run in runs:
        click.echo(str(write_report(run, root, rebuild=True)))
    click.echo(str(write_index(root)))


@main.command()
@click.argument("folders", nargs=-1, type=EXISTING_FOLDER, metavar="A B...", required=True)
@json_option
def compare(folders: tuple[Path, ...], as_json: bool) -> None:
    """Set the measurements of two or more runs side by side, each beside the first, A.

    On the same hardware: the ratio of medians, A over the other, with its interval; above 1, the other is faster. On
    different hardware times are not compared. There a row is a pair that both runs timed in turn, and ratio_of_ratios
    says how many times what b gains over a there is what it gains here, in A. Rows of the same parameters stand below
    these.

    \b
    Example: hilbert compare reports/local/RUN_1 reports/local/RUN_2
    Example: hilbert compare reports/h200/*9a4151a0/08* reports/h100/*/08*
    """
    from hilbert_lib.lab.records import compare_runs

    with usage_errors():
        table = compare_runs(*folders)
    if as_json:
        print_json(json.loads(table.to_json(orient="records")))
        return
    parameters = [name for name in table if name.endswith("parameters")]
    for (first, *later), rows in table.groupby(parameters, sort=False):
        lines = [first, *(f"b: {text}" for text in later if text != first)]
        click.echo("\n".join(lines).replace('"', ""))
        click.echo(rows.drop(columns=parameters).to_string(index=False, float_format="{:.4g}".format) + "\n")


@main.command()
@out_option
def doctor(out: Path) -> None:
    """Look whether this machine can run the suite, and say in one line what mends what is broken.

    The GPU, the kernels, the notebooks' Python, and the folder of the reports with its disk. The exit status is 1 if
    anything is broken.

    \b
    Example: hilbert doctor
    """
    from hilbert_lib.lab.suite.doctor import examine

    with usage_errors():
        findings = list(examine(out))
    for subject, finding, fix in findings:
        click.echo(f"{'BROKEN' if fix else 'ok':<7} {subject:<9} {finding}" + (f"\n{'':<17} fix: {fix}" if fix else ""))
    sys.exit(any(fix for *_, fix in findings))
