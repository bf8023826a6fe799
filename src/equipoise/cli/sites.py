"""The commands for real sites: certs, serve, join, local. Flower, an optional dependency, is imported when used."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli import console
from equipoise.cli.progress import bar
from equipoise.core.errors import ConfigError

app = typer.Typer()

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The run's configuration.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="a.b=c", help="Change a setting; may be repeated.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Use neither TLS nor keys: for try-outs on a trusted network.")
]
AllowModel = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-model",
        metavar="MODULE:FUNCTION",
        help="A model outside Equipoise that may run at a site; may be repeated.",
    ),
]
AllowMethod = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-method",
        metavar="MODULE:CLASS",
        help="A method outside Equipoise that may run at a site; may be repeated.",
    ),
]


@app.command()
def certs(
    out: Annotated[Path, typer.Option("--out", help="Folder for the keys and certificates.")] = Path("certs"),
    sites: Annotated[str, typer.Option("--sites", help="Names of sites, such as site_a,site_b.")] = "",
    host: Annotated[str, typer.Option("--host", help="Names or addresses under which sites reach the server.")] = "",
    days: Annotated[int, typer.Option("--days", min=1, help="How long the server's certificate is valid.")] = 365,
) -> None:
    """Make an authority, the server's certificate and a key for each site; run again to add sites."""
    _need("cryptography")
    from equipoise.deploy.transport.certs import make

    made = make(out, _names(sites), _names(host), days)
    console.out.print(f"wrote {', '.join(map(str, made))}", soft_wrap=True)
    console.out.print(
        f"send each site its own folder and the server {out / 'server'} over a safe channel; keep"
        f" {out / 'authority'} offline: with its key, another server can pass for yours",
        soft_wrap=True,
    )


@app.command()
def serve(
    config: ConfigFile,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder; default runs/NAME.")] = None,
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The port for sites.")] = 9092,
    certs: Annotated[Path, typer.Option("--certs", help="The server's folder of `equipoise certs`.")] = Path(
        "certs/server"
    ),
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Train a run whose clients are sites that join over the network."""
    _need("flwr")
    from equipoise.deploy.serve import serve
    from equipoise.deploy.transport.link import Door
    from equipoise.runs.config import load_config

    folder = out or console.free_folder(Path("runs") / config.stem)
    door = Door(host, port, None if insecure else certs)
    with bar(console.err) as watch:
        if insecure:
            watch.notify(_warning("anyone who reaches the port can join under any name and read all messages"))
        result = serve(load_config(config, sets or ()), folder, door, watch)
    console.show_run(folder, result, as_json)


@app.command()
def join(
    server: Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="Where the server is.")],
    name: Annotated[str, typer.Option("--name", help="The name of this site.")],
    data: Annotated[Path, typer.Option("--data", help="A .csv, .parquet or .npz file, or a folder of images.")],
    certs: Annotated[
        Path | None, typer.Option("--certs", help="This site's folder of `equipoise certs`; default certs/NAME.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="This site's own folder, for the model too; default sites/NAME.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Where to train: cpu, cuda or cuda:N.")] = "cpu",
    models: AllowModel = None,
    methods: AllowMethod = None,
    insecure: Insecure = False,
) -> None:
    """Take part in a run with the data of this site; the data never leave the site."""
    _need("flwr")
    from equipoise.deploy.join import Way, join
    from equipoise.deploy.site import Site, reading
    from equipoise.deploy.transport.certs import check_name

    def say(sentence: str) -> None:
        console.err.print(f"{name}: {sentence}", soft_wrap=True, highlight=False, markup=False)

    if not data.exists():
        raise ConfigError(f"--data {data}: there is no such file or folder")
    way = Way(server, None if insecure else certs or Path("certs") / check_name(name))
    if insecure:
        say(_warning("others can read and change the messages on their way, and the server can be anyone"))
    folder = out or Path("sites") / name
    allowed = {"models": tuple(models or ()), "methods": tuple(methods or ())}
    site = Site(name, reading(data), folder, device=device, **allowed, say=say)
    try:
        join(site, way, say)
    except KeyboardInterrupt:
        say("left the run; run the same command to join again")
        raise typer.Exit(130) from None


@app.command()
def local(
    config: ConfigFile,
    sites: Annotated[int, typer.Option("--sites", min=1, help="How many sites to divide the data among.")] = 3,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder; default runs/NAME.")] = None,
    models: AllowModel = None,
    methods: AllowMethod = None,
    as_json: Json = False,
) -> None:
    """Try out a server and several sites on this machine; all processes end with this command."""
    _need("flwr")
    from equipoise.deploy.tryout import local
    from equipoise.runs.config import load_config

    folder = out or console.free_folder(Path("runs") / config.stem)
    with bar(console.err) as watch:
        loaded = load_config(config, sets or ())
        result = local(loaded, folder, sites, watch, models=models or (), methods=methods or ())
    console.show_run(folder, result, as_json)


def _need(module: str) -> None:
    if find_spec(module) is None:
        raise ConfigError(f"real sites need {module}, which is not installed: `pip install equipoise[flower]`")


def _names(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def _warning(risk: str) -> str:
    return f"WARNING: --insecure uses neither TLS nor keys: {risk}"
