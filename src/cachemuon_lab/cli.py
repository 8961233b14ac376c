"""The command `cachemuon`: reads arguments, calls the laboratory, prints. `main` is where errors end.

What takes long is imported by the command that needs it, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from cachemuon_lab.terminal import (
    console,
    display,
    documents,
    new_table,
    processes,
    progress,
    say,
    say_prepared,
    status,
)

if TYPE_CHECKING:
    from cachemuon.flops import Cost, Shape
    from cachemuon_lab.recipes import Recipe
    from cachemuon_lab.record import Run
    from cachemuon_lab.tables import Comparison

RUNS = Path("runs")
INTERRUPTED, WRONG = 130, 2

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
preparation = typer.Typer(
    help="Turn text into train.bin and val.bin. Interrupted, the same command goes on.", no_args_is_help=True
)
app.add_typer(preparation, name="prepare")

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="One of `cachemuon train --list`.")]
Kind = Annotated[
    str | None,
    typer.Option(
        "--optimizer", help="polar, gram, paper, cache, jordan, stale or adamw; else the recipe's first."
    ),
]
Gamma = Annotated[float | None, typer.Option(help="CacheMuon's threshold.")]
MaxAge = Annotated[int | None, typer.Option(help="Steps that CacheMuon may reuse a transform for.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, as steps=100 or optimizer.lr=0.02."),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where to write; under runs/ if not given.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Begin anew in place of what is there.")]
RunFolders = Annotated[
    list[Path], typer.Argument(metavar="RUNS...", help="Folders of runs, or folders that hold some.")
]
Vocabulary = Annotated[
    Path | None,
    typer.Option(help="A folder with GPT-2's encoder.json and vocab.bpe, if they can't be downloaded."),
]
Held = Annotated[float, typer.Option("--validation", help="The fraction of documents to hold out.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 if all went well, 2 with one line on stderr if not, 130 on Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(arguments, prog_name="cachemuon", standalone_mode=False) or 0
        if code == INTERRUPTED:  # what typer makes of a KeyboardInterrupt
            code = _interrupted("interrupted", arguments)
    except typer.TyperException as error:
        message = error.format_message()  # none where the help was shown instead
        code = _wrong(message) if message else WRONG
    except OSError as error:
        code = _wrong(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ModuleNotFoundError as error:
        code = _wrong(f"{error.name} is not installed: pip install 'cachemuon[lab]'")
    except ValueError as error:
        code = _wrong(str(error))
    except Exception as error:
        from cachemuon_lab.train import Interrupted

        if isinstance(error, Interrupted):
            code = _interrupted(f"stopped after step {error.step} of {error.folder}", arguments)
        elif isinstance(error, MemoryError) or "allocate memory" in str(error):  # torch's is a RuntimeError
            code = _wrong(f"there is not enough memory: {error}")
        else:
            raise
    sys.exit(code)


def _wrong(message: str) -> int:
    print("cachemuon:", " ".join(message.split()), file=sys.stderr)
    return WRONG


def _interrupted(what: str, arguments: list[str]) -> int:
    again = [word for word in arguments if word not in ("--overwrite", "--resume")]
    again += ["--resume"] if again[:1] == ["train"] else []
    print(f"cachemuon: {what}; to go on: cachemuon {shlex.join(again)}", file=sys.stderr)
    return INTERRUPTED


def _version(asked: bool) -> None:
    if asked:
        from cachemuon import __version__

        print("cachemuon", __version__)
        raise typer.Exit


@app.callback()
def command(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Which version this is.")
    ] = False,
) -> None:
    """CacheMuon's laboratory: the paper's experiments, one command each."""


@app.command()
def demo(
    out: Out = None,
    quick: Annotated[bool, typer.Option("--quick", help="A toy of seconds, to see that all works.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Compare CacheMuon with fresh Muon on this machine, in minutes and without a download."""
    from cachemuon_lab.compare import compare, demonstration

    out = out or RUNS / ("demo-quick" if quick else "demo")
    recipe, began = demonstration(quick=quick), time.perf_counter()
    say(f"{len(recipe.variants)} runs of {recipe.base.steps} steps, into {out}", sys.stderr)
    with progress() as show:
        runs = compare(recipe, out, resume=not overwrite, on_progress=show)
    comparison = _table(runs)
    page = _pictures(runs, out, "cachemuon demo" + " --quick" * quick)
    trained = sum(run.end["seconds"] for run in runs if run.end)
    say(f"{trained:.0f} s of training, {time.perf_counter() - began:.0f} s in all.")
    say(_conclusion(comparison))
    say(page)


@preparation.command("openwebtext")
def prepare_openwebtext(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.")] = Path("data/openwebtext"),
    vocabulary_files: Vocabulary = None,
    validation: Held = 0.0005,
) -> None:
    """Stream OpenWebText from its hub and tokenize it."""
    from cachemuon_lab.data.prepare import prepare_openwebtext as prepare

    with documents() as progress:
        meta = prepare(out, vocabulary_files=vocabulary_files, validation=validation, progress=progress)
    say_prepared(meta, out)


@preparation.command("text")
def prepare_text(
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="UTF-8 text files.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.")] = Path("data/text"),
    tokenizer: Annotated[str, typer.Option(help="gpt2 or bytes.")] = "gpt2",
    vocabulary_files: Vocabulary = None,
    validation: Held = 0.0005,
) -> None:
    """Tokenize text files."""
    from cachemuon_lab.data.prepare import prepare_text as prepare

    with documents() as progress:
        meta = prepare(
            files,
            out,
            tokenizer,
            vocabulary_files=vocabulary_files,
            validation=validation,
            progress=progress,
        )
    say_prepared(meta, out)


@app.command()
def train(
    recipe_name: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="One of those that --list shows.")
    ] = None,
    optimizer: Kind = None,
    gamma: Gamma = None,
    max_age: MaxAge = None,
    settings: Set = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    overwrite: Overwrite = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write for TensorBoard.")] = False,
    strategy: Annotated[
        str,
        typer.Option(help="How torchrun's processes share a model: ddp (a copy each), fsdp (shards)."),
    ] = "ddp",
    listing: Annotated[bool, typer.Option("--list", help="Show all recipes, and train nothing.")] = False,
) -> None:
    """Train one optimizer on a recipe. Under torchrun: on all of its processes.

    With torchrun's --max-restarts a run goes on from its last checkpoint after a process has died.
    """
    from cachemuon_lab.compare import configure, variant
    from cachemuon_lab.recipes import recipe
    from cachemuon_lab.train import train

    if listing:
        return _list_recipes()
    if recipe_name is None:
        raise ValueError("a recipe is needed: `cachemuon train --list` shows them")
    chosen = recipe(recipe_name)
    which = variant(chosen, optimizer, gamma=gamma, max_age=max_age)
    config = configure(chosen, which, settings or ())
    if out is None:
        if config.name in (".", "..") or set(config.name) & set("/\\"):
            raise ValueError(f"name must be that of a folder under {RUNS}, no path, got {config.name!r}")
        out = RUNS / config.name
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    with processes() as first, progress(first) as show:
        label = {"label": config.optimizer.label, "run": 1, "runs": 1}
        run = train(
            config,
            out,
            resume=resume or restarted,
            overwrite=overwrite and not restarted,
            strategy=strategy,
            on_progress=lambda state: show({**state, **label}),
            tensorboard=tensorboard,
        )
    if first:
        _table([run])
        say(f"The run is in {out}.")


@app.command()
def compare(
    recipe_name: RecipeName,
    seeds: Annotated[int, typer.Option(help="Runs of each optimizer.")] = 1,
    settings: Set = None,
    extra: Annotated[
        list[str] | None, typer.Option("--with", metavar="KIND", help="Add adamw, stale, jordan or cache.")
    ] = None,
    out: Out = None,
    overwrite: Overwrite = False,
) -> None:
    """Train all optimizers of a recipe on the same batches; print the table, write figures and report."""
    from cachemuon_lab.compare import compare, variant
    from cachemuon_lab.recipes import recipe

    chosen = recipe(recipe_name)
    variants = [*chosen.variants, *(variant(chosen, kind) for kind in extra or ())]
    out = out or RUNS / chosen.name
    with processes() as first, progress(first) as show:
        runs = compare(
            chosen,
            out,
            variants=variants,
            seeds=seeds,
            overrides=settings or (),
            resume=not overwrite,
            on_progress=show,
        )
    if first:
        _table(runs)
        given = [
            f"--seeds {seeds}",
            *(f"--set {one}" for one in settings or ()),
            *(f"--with {k}" for k in extra or ()),
        ]
        say(_pictures(runs, out, " ".join(["cachemuon compare", recipe_name, *given])))


@app.command()
def sweep(
    recipe_name: RecipeName,
    optimizer: Kind = None,
    gamma: Gamma = None,
    max_age: MaxAge = None,
    steps: Annotated[
        int | None, typer.Option(help="Length of the proxy runs; the recipe's if not given.")
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="At most so many points now.")] = None,
    prune: Annotated[
        bool, typer.Option(help="End runs that are worse than the median of the others.")
    ] = True,
    settings: Set = None,
    out: Out = None,
) -> None:
    """Search the paper's grid of 36 settings. The same command goes on with what is there."""
    from cachemuon_lab.compare import variant
    from cachemuon_lab.recipes import recipe
    from cachemuon_lab.sweep import sweep

    chosen = recipe(recipe_name)
    out = out or RUNS / f"{chosen.name}-sweep"
    with processes() as first, progress(first) as show:
        result = sweep(
            chosen,
            out,
            optimizer=variant(chosen, optimizer, gamma=gamma, max_age=max_age),
            steps=steps,
            overrides=settings or (),
            trials=trials,
            prune=prune,
            on_progress=show,
        )
    if not first:
        return
    names = [key.rpartition(".")[2] for key in result.grid]
    table = new_table(
        *names, result.measure, "steps", "", title=f"{chosen.name}, {result.base.optimizer.label}"
    )
    for trial in result.trials:
        value = "-" if trial.value is None else f"{trial.value:.4f}"
        numbers = (f"{trial.settings[key]:g}" for key in result.grid)
        table.add_row(*numbers, value, f"{trial.steps:,}", "pruned" if trial.pruned else "")
    display(table)
    if left := result.points - len(result.trials):
        say(f"{left} of {result.points} points are left; the same command goes on with them.")
    if result.best is None:
        return say("No trial has been finished yet.")
    say("The best so far:" if left else "The best:")
    say("  " + " ".join(f"--set {override}" for override in result.overrides))
    say("  " + result.optimizer)


@app.command()
def diagnose(
    recipe_name: RecipeName, settings: Set = None, out: Out = None, overwrite: Overwrite = False
) -> None:
    """Run a recipe's diagnostics, residual gate or ages of the transform, and draw them."""
    from cachemuon_lab.compare import compare

    twins = _diagnostics_of(recipe_name)
    out = out or RUNS / f"{recipe_name}-diagnosed"
    runs = []
    with processes() as first, progress(first) as show:
        for twin in twins:
            runs += compare(
                twin, out / twin.name, overrides=settings or (), resume=not overwrite, on_progress=show
            )
    if first:
        _draw(runs, out / "figures")


@app.command()
def figures(
    runs: RunFolders,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder for the figures.")] = Path("figures"),
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="pdf, png or svg; all if not given.")
    ] = None,
) -> None:
    """Draw every figure that the runs allow."""
    _draw(_open_runs(runs), out, formats)


@app.command()
def report(
    runs: RunFolders,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page, or its folder.")] = Path("report.html"),
) -> None:
    """Write an HTML page about the runs."""
    from cachemuon_lab.report import write_report

    say(f"The report is {write_report(_open_runs(runs), out)}.")


@app.command()
def flops(
    what: Annotated[
        list[str],
        typer.Argument(metavar="MODEL|SHAPES...", help="gpt2-small, gpt2-large, resnet18, or as 768x3072."),
    ],
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 1,
    replicas: Annotated[int, typer.Option(help="Devices that each orthogonalize everything.")] = 1,
    hit_rate: Annotated[float | None, typer.Option(help="Also price CacheMuon, if this part hits.")] = None,
) -> None:
    """Price orthogonalization, by the paper's model and as executed."""
    from cachemuon import CacheGNS, GramNS
    from cachemuon.flops import PaperCost, executed_by, total
    from cachemuon_lab.config import OptimizerConfig

    def clipped(n: int, m: int) -> Cost:
        return executed_by(GramNS(), n, m, rank=CacheGNS(clip=OptimizerConfig.clip).rank(min(n, m)))

    shapes = [shape for word in what for shape in _shapes(word)]
    models: dict[str, Callable[[int, int], Cost]] = {
        "the paper's model": PaperCost,
        "executed, exact probe": partial(executed_by, GramNS(), probe="exact"),
        "executed, sketched probe": partial(executed_by, GramNS()),
        "executed, clipped": clipped,
    }
    table = new_table(
        "shape", "matrices", "hit", "miss", "GramNS", "StandardNS", "break-even", title="GFLOPs of one call"
    )
    for name, model in models.items():
        table.add_section()
        table.add_row(Text(name, style="bold"))
        for (rows, columns), count in Counter(shapes).items():
            cost = model(rows, columns)
            prices = (f"{price / 1e9:,.4g}" for price in (cost.hit, cost.miss, cost.gram, cost.standard))
            table.add_row(f"{rows}x{columns}", str(count), *prices, f"{cost.break_even:.1%}")
    display(table)

    sums: dict[str, list[float]] = {}
    for model in models.values():
        add = partial(total, shapes, steps, replicas=replicas, model=model)
        sums.setdefault("GramMuon", []).append(add(solver="gram"))
        sums.setdefault("PolarExpMuon", []).append(add(solver="standard"))
        if hit_rate is not None:
            sums.setdefault(f"CacheMuon, {hit_rate:.0%} hits", []).append(add(solver="cache", hits=hit_rate))
    largest = max(value for row in sums.values() for value in row)
    scale, unit = next(
        (pair for pair in ((1e15, "P"), (1e12, "T"), (1e9, "G")) if largest >= pair[0]), (1e6, "M")
    )
    on = f" on {replicas} replicas" if replicas > 1 else ""
    title = f"{unit}FLOPs of {len(shapes)} matrices in {steps:,} step{'s' * (steps > 1)}{on}"
    table = new_table("", *models, title=title)
    for label, row in sums.items():
        table.add_row(label, *(f"{value / scale:,.2f}" for value in row))
    display(table)


@app.command()
def bench(
    out: Out = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="PART",
            help="solvers, steps, even, worst, share, growth, host or ceilings; else all.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often each contender has its turn.")] = 15,
    quick: Annotated[bool, typer.Option("--quick", help="Toy sizes, to see that all works.")] = False,
    again: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Only tables and pictures, of an earlier bench.json."),
    ] = None,
    pages: Annotated[
        list[Path] | None,
        typer.Option("--page", metavar="FILE", help="Also renew the tables of this Markdown page."),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Time solvers and optimizer steps on this machine, beside every other Muon that is installed.

    Nothing else should run meanwhile. Interrupted, the same command goes on with the next part.
    """
    from cachemuon_lab.bench import PARTS, measured, run
    from cachemuon_lab.performance import draw, renew, tables, to_page
    from cachemuon_lab.timing import avoid_trapped_bf16

    if unknown := [part for part in only or () if part not in PARTS]:
        raise ValueError(f"--only must be one of {', '.join(PARTS)}, got {unknown[0]!r}")
    if rounds < 2:
        raise ValueError(f"--rounds must be at least 2, got {rounds}")
    out = out or RUNS / ("bench-quick" if quick else "bench")
    if again is not None:
        results = measured(again)
    else:
        avoid_trapped_bf16()
        if overwrite:
            (out / "bench.json").unlink(missing_ok=True)
        with status() as tell:
            results = run(out, only or PARTS, rounds=rounds, quick=quick, tell=tell)
    for title, (heads, *rows) in tables(results).values():
        table = new_table(*heads, title=title)
        for row in rows:
            table.add_row(*row)
        display(table)
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.md").write_text(to_page(results))
    renew(pages or (), tables(results))
    pictures = draw(results, out)
    say(f"Written: {', '.join(map(str, [out / 'bench.json', out / 'bench.md', *pictures]))}")


def _shapes(word: str) -> Sequence[Shape]:
    from cachemuon.flops import GPT2_LARGE, GPT2_SMALL, RESNET18

    models = {"gpt2-small": GPT2_SMALL, "gpt2-large": GPT2_LARGE, "resnet18": RESNET18}
    if word in models:
        return models[word]
    rows, _, columns = word.partition("x")
    if not all(side.isdecimal() and 0 < len(side) < 10 for side in (rows, columns)):
        raise ValueError(f"expected {', '.join(models)} or a shape as 768x3072, got {word!r}")
    return [(int(rows), int(columns))]


def _list_recipes() -> None:
    from cachemuon_lab.recipes import RECIPES

    table = new_table("recipe", "steps", "what", "optimizers", title="cachemuon train RECIPE", justify="left")
    for recipe in RECIPES.values():
        labels = "\n".join(one.label for one in recipe.variants)
        table.add_row(recipe.name, f"{recipe.base.steps:,}", recipe.description, labels)
        table.add_section()
    display(table)


def _diagnostics_of(name: str) -> list[Recipe]:
    """The recipe itself if it measures something, else its twins that do."""
    from cachemuon_lab.recipes import RECIPES, recipe

    chosen = recipe(name)
    if chosen.base.diagnostics != "off":
        return [chosen]
    found = [RECIPES[twin] for twin in (f"{name}-diagnostics", f"{name}-ages") if twin in RECIPES]
    if not found:
        known = ", ".join(one.name for one in RECIPES.values() if one.base.diagnostics != "off")
        raise ValueError(f"{name} has no diagnostics; these have: {known}")
    return found


def _open_runs(paths: Iterable[Path]) -> list[Run]:
    from cachemuon_lab.record import CONFIG, Run

    runs: list[Run] = []
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"there is no folder {path}")
        folders = [path] if (path / CONFIG).is_file() else sorted(p.parent for p in path.glob(f"*/{CONFIG}"))
        if not folders:
            raise ValueError(f"{path} is no run, and holds none: no {CONFIG}")
        runs += [Run.open(folder) for folder in folders]
    return runs


def _table(runs: list[Run]) -> Comparison:
    from cachemuon_lab.tables import compare, to_rich

    comparison = compare(runs)
    display(to_rich(comparison, width=console().width))
    return comparison


def _pictures(runs: list[Run], out: Path, command: str) -> str:
    """Figures and report of a comparison; returns where they are."""
    from cachemuon_lab.figures import figures
    from cachemuon_lab.report import write_report

    figures(runs, out / "figures")
    return f"The report is {write_report(runs, out, [command])}, its figures are in {out / 'figures'}."


def _draw(runs: list[Run], out: Path, formats: Sequence[str] | None = None) -> None:
    from cachemuon_lab.figures import figures

    drawn = figures(runs, out, **({"formats": formats} if formats else {}))
    for figure in drawn:
        say(f"{figure.name}: {', '.join(map(str, figure.paths)) or figure.caption}")


def _conclusion(comparison: Comparison) -> str:
    """In two sentences: what was saved, and what it cost in quality."""
    from cachemuon_lab.config import CACHING

    gram = next(row for row in comparison.rows if row.kind == "gram")
    saved, lost = [], []
    for row in comparison.rows:
        if row.kind not in CACHING:
            continue
        by_paper, executed = (row.cells[f"saved_{model}_gram"] for model in ("paper", "executed"))
        if by_paper is not None and executed is not None:
            saved.append(f"{row.title}: {by_paper.mean:.0%} ({executed.mean:.0%})")
        if row.cells["loss"] is not None and gram.cells["loss"] is not None:
            difference = round(row.cells["loss"].mean - gram.cells["loss"].mean, 3)
            lost.append(f"{row.title}: {difference + 0.0:+.3f}")  # 0.0: so that nothing is -0
    best = gram.cells["loss"]
    return (
        "Of GramMuon's orthogonalization FLOPs CacheMuon saved, by the paper's count (and as executed), "
        f"{', '.join(saved)}.\n"
        f"Its best validation loss was, beside GramMuon's {best.mean if best else 0:.3f} (less is better), "
        f"{', '.join(lost)}; this is one seed, and differences of a few hundredths may be noise: "
        "`cachemuon compare gpt2-nano --seeds 3` says more."
    )


if __name__ == "__main__":
    main()
