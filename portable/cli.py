"""The command line: what can run here (`doctor`), the environment variables (`env`), what became of a model
(`explain`), which of its ops run where (`coverage`), whether it fits a device that is not here (`check`), and how fast
a backend is (`bench`, in benchmarks/command.py)."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
import typer.core
import typer.main
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import portable
from portable import config
from portable.errors import ConfigError, PortableError, UnsupportedInputError, UserCodeError
from portable.kernels import command

if TYPE_CHECKING:
    pass


class _Commands(typer.core.TyperGroup):
    """The commands of this file, and those that other packages of portable define: loaded when they are asked for."""

    elsewhere: ClassVar[dict[str, str]] = {"bench": "benchmarks.command"}

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.elsewhere})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.elsewhere:
            return super().get_command(ctx, cmd_name)
        command = typer.main.get_command(_installed(self.elsewhere[cmd_name]).app)
        command.name = cmd_name
        command.context_settings = {"help_option_names": ["-h", "--help"]}
        # options of a program that stands alone: `portable` has none of them
        command.params = [p for p in command.params if p.name not in ("install_completion", "show_completion")]
        return command


def _installed(module: str) -> Any:
    """``portable.<module>``, or in a checkout that is not installed the one beside this package."""
    try:
        return importlib.import_module(f"portable.{module}")
    except ModuleNotFoundError as failure:
        if failure.name != f"portable.{module.partition('.')[0]}":
            raise
        return importlib.import_module(module)


app = typer.Typer(
    cls=_Commands,
    help="portable: run one PyTorch model on any accelerator.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    rich_markup_mode="rich",
)
app.add_typer(command.app, name="ledger")
console = Console()
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def main() -> None:
    """Entry point of the console script: an error of ours is one message and exit status 2, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 lacks some of our characters
    try:
        app()
    except PortableError as failure:
        Console(stderr=True).print(f"[bold red]{type(failure).__name__}[/]: {escape(str(failure))}", highlight=False)
        sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"portable {portable.__version__}")
        raise typer.Exit()


@app.callback()
def portable_command(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Run one PyTorch model on any accelerator."""


@app.command()
def doctor(
    backend: Annotated[
        str, typer.Option(help="Only this backend; exit status 1 if it is not ready.", show_default=False)
    ] = "",
    as_json: AsJson = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Show what each backend is good at, and the traceback of plugins that fail."
        ),
    ] = False,
) -> None:
    """What can run here: each backend, ready or why not and what to do, and the versions.

    On each backend that is ready one small program is compiled and run.
    """
    from portable import backends
    from portable.backends.diagnosis import diagnosis

    if backend:
        backends.backend_class(backend)
    with Console(stderr=True).status("running a small program on each backend that is ready …"):
        report = diagnosis(verbose, backend)
    status = 0 if not backend or report["backends"][0]["ready"] else 1
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        raise typer.Exit(status)
    versions = report["versions"]
    console.print(
        " · ".join(f"{name} {version}" for name, version in versions.items()) + f" · {report['machine']}",
        highlight=False,
    )
    table = Table("backend", "path", "state", "evidence", box=None, pad_edge=False)
    for row in report["backends"]:
        state = escape(row["reason"]) + (f"   [dim]→ {escape(row['remedy'])}[/]" if row["remedy"] else "")
        table.add_row(row["name"], row["path"], f"[green]{state}[/]" if row["ready"] else state, row["evidence"])
    console.print(table)
    if report["choice"]:
        console.print(report["choice"], highlight=False)
    for name, place in report["places"].items():
        problem = place["problem"]
        remedy = {"cache": "PORTABLE_CACHE_DIR names another folder", "ledger": "PORTABLE_LEDGER names another file"}
        state = f"[red]cannot be written: {escape(problem)}[/]   → {remedy[name]}" if problem else "can be written"
        console.print(f"{name}: {escape(place['path'])}, {state}", highlight=False, soft_wrap=True)
    if verbose:
        _print_capabilities(report["backends"])
    for row in report["backends"]:
        if verbose and row["traceback"]:
            console.print(f"\n{row['name']}:\n{escape(row['traceback'])}", highlight=False, soft_wrap=True)
    raise typer.Exit(status)


def _print_capabilities(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        lines = {**row["capabilities"], **row["executors"]}
        if row["compiles_for"]:
            lines["can compile for"] = row["compiles_for"]
        if lines:
            console.print(f"\n[bold]{row['name']}[/]")
        for name, value in lines.items():
            if isinstance(value, dict):
                text = "; ".join(f"{key}: {why}" for key, why in value.items())
            elif isinstance(value, list):
                text = " ".join(value)
            else:
                text = {True: "yes", False: "no"}.get(value, str(value))
            console.print(f"  {name}: {escape(text) or 'none'}", highlight=False)


@app.command()
def env(as_json: AsJson = False) -> None:
    """The environment variables: type, default, value in force, meaning."""
    rows = [
        {"name": v.name, "type": v.type, "default": v.default, "value": os.environ.get(v.name, ""), "doc": v.doc}
        for v in config.VARIABLES.values()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("variable", no_wrap=True, min_width=max(len(name) for name in config.VARIABLES))
    for title in ("type", "default", "set to", "meaning"):
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(row[key])) for key in ("name", "type", "default", "value", "doc")))
    console.print(table)
    for v in config.VARIABLES.values():
        config.get(v.name)


@app.command()
def explain(
    model: Annotated[
        str,
        typer.Argument(
            help="module:function or path/to/file.py:function, which returns (model, args[, kwargs]); "
            "or a script, which is run with the arguments that follow it."
        ),
    ],
    arguments: Annotated[list[str] | None, typer.Argument(help="Of the script.", show_default=False)] = None,
    backend: Annotated[str, typer.Option(help="Backend; default PORTABLE_BACKEND.")] = "",
    as_json: AsJson = False,
) -> None:
    """Run a model once, or a script, and show what became of it: ops, graph breaks, compilations, fallbacks."""
    import torch

    if model.endswith(".py"):
        from portable.explain import Explanation

        explained = [Explanation(record) for record in run_script(model, arguments or [], backend)]
        if not explained:
            raise ConfigError(f"{model} compiled no model", remedy="it has to call pt.compile, and what that returns")
        if as_json:
            typer.echo(json.dumps([e.to_dict() for e in explained], indent=2))
        for explanation in () if as_json else explained:
            console.print(explanation)
        return
    if arguments:
        raise ConfigError(f"{model} takes no arguments: {' '.join(arguments)}", remedy="only a script does")
    function, args, kwargs = load_model(model)
    compiled = portable.compile(function, backend=backend or None)
    with console.status("capturing and compiling …"), torch.no_grad(), users_code():
        compiled(*args, **kwargs)
    explanation = portable.explain(compiled, show=False)
    if as_json:
        typer.echo(json.dumps(explanation.to_dict(), indent=2))
    else:
        console.print(explanation)


@app.command()
def coverage(
    model: Annotated[
        str,
        typer.Argument(help="module:function or path/to/file.py:function, which returns (model, args[, kwargs])."),
    ],
    target: Annotated[
        list[str] | None,
        typer.Option(help="As xla, xla:cuda, tpu or tpu:v5e:2x2; may be given several times.", show_default="all"),
    ] = None,
    backward: Annotated[bool, typer.Option(help="Also the backward pass.")] = False,
    as_json: AsJson = False,
) -> None:
    """Which operators of a model run on which target, present or not. Exit status 1 if one is refused somewhere."""
    function, args, kwargs = load_model(model)
    with console.status("capturing and lowering …"), users_code():
        found = portable.coverage(function, args, kwargs, targets=target or "all", backward=backward)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        console.print(found)
    raise typer.Exit(0 if found.complete else 1)


@app.command()
def check(
    model: Annotated[
        str,
        typer.Argument(help="module:function or path/to/file.py:function, which returns (model, args[, kwargs])."),
    ],
    target: Annotated[
        list[str],
        typer.Option(help="A device, as tpu:v5e:2x2 or cuda:h200; may be given several times.", show_default=False),
    ],
    backward: Annotated[bool, typer.Option(help="Also the backward pass.")] = False,
    mesh: Annotated[str, typer.Option(help="Divide the program over a slice: batch=4,tensor=4.")] = "",
    shard: Annotated[
        list[str] | None, typer.Option(help="Which dimension of weights lies along tensor: '*.weight=0'.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile a model for devices that are not here: does it compile, does it fit, what does it cost?

    The function is called with the meta device as torch's default, so that weights take no memory.

    Exit status 1 if the model does not compile or does not fit somewhere.
    """
    import torch

    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # this process only lowers: no plugin needs to look for its device
    options: dict[str, Any] = {"backward": backward, "mesh": _numbers("--mesh", mesh.split(",") if mesh else [])}
    options["plan"] = _numbers("--shard", shard or [])
    with _Progress() as told, contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is no result
        try:
            with torch.device("meta"):
                made = load_model(model)
            with users_code():
                found = portable.check(*made, target, progress=told, **options)
        except (NotImplementedError, RuntimeError) as failure:
            if "meta" not in str(failure) and not isinstance(failure, UnsupportedInputError):
                raise
            reason = str(failure).strip().partition("\n")[0]
            told(f"building {model} with values: {reason}")
            made = load_model(model)
            with users_code():
                found = portable.check(*made, target, progress=told, **options)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        console.print(found)
    raise typer.Exit(0 if found.ok else 1)


class _Progress:
    """A line on the terminal's standard error that says what goes on, and for how long it has."""

    def __init__(self) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)

    def __enter__(self) -> Any:
        self._progress.start()
        return self._say

    def _say(self, line: str) -> None:
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        self._progress.add_task(escape(line), total=None)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def _numbers(option: str, pairs: Sequence[str]) -> dict[str, int]:
    """{name: number} from ``name=number`` texts.

    Raises:
        ConfigError: one is not of that form.
    """
    found = {}
    for pair in pairs:
        name, _, number = pair.rpartition("=")
        if not name or not number.strip().lstrip("-").isdigit():
            raise ConfigError(f"{option} {pair!r} is not legal", remedy=f"as in {option} name=4")
        found[name.strip()] = int(number)
    return found


def run_script(path: str, arguments: Sequence[str], backend: str) -> list[Any]:
    """Run a script as ``python path arguments`` would; the records of what it compiled, in order.

    Raises:
        ConfigError: there is no such file.
    """
    import runpy

    from portable.explain import collecting

    if not Path(path).is_file():
        raise ConfigError(f"there is no file {path}", remedy="name a Python script, or module:function")
    argv, sys.argv = sys.argv, [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    chosen = portable.use_backend(backend) if backend else contextlib.nullcontext()
    try:
        with collecting() as records, chosen, users_code():
            runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    finally:
        sys.argv = argv
        sys.path.pop(0)
    return [record for record in records if record.graphs]


def load_model(spec: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(model, args, kwargs) from ``module:function`` or ``path/to/file.py:function``.

    Raises:
        ConfigError: there is no such module or function, or it returns something else.
    """
    source, _, name = spec.rpartition(":")
    remedy = (
        "write module:function or path/to/file.py:function; "
        "the function takes no arguments and returns (model, args) or (model, args, kwargs)"
    )
    if not source:
        raise ConfigError(f"{spec!r} names no function", remedy=remedy)
    try:
        with users_code():
            module = _module(source)
        function = getattr(module, name)
    except (ImportError, FileNotFoundError, AttributeError) as failure:
        raise ConfigError(f"{spec!r} cannot be loaded: {failure}", remedy=remedy) from failure
    if not callable(function):
        raise ConfigError(f"{spec} is a {type(function).__name__}, not a function", remedy=remedy)
    try:
        needed = [p.name for p in inspect.signature(function).parameters.values() if _is_required(p)]
    except (TypeError, ValueError):  # a builtin
        needed = []
    if needed:
        raise ConfigError(f"{spec} needs arguments ({', '.join(needed)}), and is called without", remedy=remedy)
    with users_code():
        made = function()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        raise ConfigError(f"{spec} returned {_kinds(made)}, not (model, args[, kwargs])", remedy=remedy)
    if not isinstance(made[1], (tuple, list)) or not isinstance(made[2] if len(made) == 3 else {}, dict):
        raise ConfigError(
            f"{spec} returned {_kinds(made)}: args is a tuple, and kwargs a dict",
            remedy="return (model, (x,)) for a model that takes one tensor",
        )
    args, kwargs = tuple(made[1]), dict(made[2]) if len(made) == 3 else {}
    called: Any = getattr(made[0], "forward", made[0])
    try:
        inspect.signature(called).bind(*args, **kwargs)
    except TypeError as failure:
        raise ConfigError(
            f"the model that {spec} returned cannot be called so: {failure}", remedy="return all its arguments"
        ) from failure
    except ValueError:  # a builtin
        pass
    return made[0], args, kwargs


def _is_required(parameter: inspect.Parameter) -> bool:
    several = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and not several


def _kinds(made: Any) -> str:
    """The types of what a user's function returned."""
    return f"({', '.join(type(x).__name__ for x in made)})" if isinstance(made, tuple) else type(made).__name__


@contextlib.contextmanager
def users_code() -> Iterator[None]:
    """Within it an error of the user's code is one message with its line, not a traceback.

    Raises:
        UserCodeError: the error, unless it comes from this package, whose traceback is to be reported.
    """
    try:
        yield
    except PortableError:
        raise
    except Exception as failure:  # whatever a user's code raises
        from portable.lowering.source import raised_at

        where = raised_at(failure)
        if not where:
            raise
        said = next(iter(str(failure).strip().splitlines()), "")
        raise UserCodeError(f"{type(failure).__name__} at {where}{': ' if said else ''}{said}") from failure


def _module(source: str) -> Any:
    if not source.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(source)
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"no file {source}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{source} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
