"""The verbs for real sites: certs, serve, join, local. Whatever needs torch or Flower is loaded when it is used."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from equipoise.errors import ConfigError

app = typer.Typer()

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The run's configuration.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="a.b=c", help="Change a setting; may be repeated.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Neither TLS nor keys: for try-outs on a trusted network.")
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
    from equipoise import cli
    from equipoise.deploy.certs import make

    made = make(out, _names(sites), _names(host), days)
    cli.out_console.print(f"wrote {', '.join(map(str, made))}", soft_wrap=True)
    cli.out_console.print(
        f"give each site its own folder over a safe channel, the server {out / 'server'}, and put"
        f" {out / 'authority'} away: its key can vouch for other servers",
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
    """Carry out a run whose clients are sites that join over the network."""
    _need("flwr")
    from equipoise import cli
    from equipoise.config import load_config
    from equipoise.deploy.link import Door
    from equipoise.deploy.serve import serve
    from equipoise.progress import bar

    folder = out or cli.free_folder(Path("runs") / config.stem)
    door = Door(host, port, None if insecure else certs)
    with bar(cli.err_console) as watch:
        if insecure:
            watch.say(_warning("anyone who reaches the port can take part, under any name, and read what is sent"))
        result = serve(load_config(config, sets or ()), folder, door, watch)
    cli.show_run(folder, result, as_json)


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
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-model", metavar="MODULE:FUNCTION", help="A network that the server may have built here."
        ),
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Take part in a run with the data of this site, which never leave it."""
    _need("flwr")
    from equipoise import cli
    from equipoise.deploy.certs import check_name
    from equipoise.deploy.join import Way, join
    from equipoise.deploy.site import Site, reading

    def say(sentence: str) -> None:
        cli.err_console.print(f"{name}: {sentence}", soft_wrap=True, highlight=False, markup=False)

    if not data.exists():
        raise ConfigError(f"--data {data}: there is no such file or folder")
    way = Way(server, None if insecure else certs or Path("certs") / check_name(name))
    if insecure:
        say(_warning("what is sent can be read and changed on the way, and the server could be anyone"))
    folder = out or Path("sites") / name
    site = Site(name, reading(data), folder, device=device, models=tuple(models or ()), say=say)
    try:
        join(site, way, say)
    except KeyboardInterrupt:
        say("left; the same command joins again")
        raise typer.Exit(130) from None


@app.command()
def local(
    config: ConfigFile,
    sites: Annotated[int, typer.Option("--sites", min=1, help="How many sites to divide the data among.")] = 3,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder; default runs/NAME.")] = None,
    as_json: Json = False,
) -> None:
    """Try out a server and several sites on this machine; every process ends with it."""
    _need("flwr")
    from equipoise import cli
    from equipoise.config import load_config
    from equipoise.deploy.local import local
    from equipoise.progress import bar

    folder = out or cli.free_folder(Path("runs") / config.stem)
    with bar(cli.err_console) as watch:
        result = local(load_config(config, sets or ()), folder, sites, watch)
    cli.show_run(folder, result, as_json)


def _need(module: str) -> None:
    if find_spec(module) is None:
        raise ConfigError(f"real sites need {module}, which is not installed: `pip install equipoise[flower]`")


def _names(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def _warning(risk: str) -> str:
    return f"WARNING: --insecure, so neither TLS nor keys: {risk}"
