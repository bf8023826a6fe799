"""The server: a run like that of `equipoise run`, but its clients are sites that join over the network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from equipoise.core.errors import CheckpointError, ConfigError
from equipoise.deploy import server
from equipoise.deploy.transport.carrier import CarrierLost
from equipoise.deploy.transport.link import Door, link
from equipoise.runs.config import Config
from equipoise.runs.folder import RunFolder
from equipoise.runs.run import Watch
from equipoise.runs.training import Record

Lost = Callable[[], str | None]  # returns why the run cannot go on, or None while it can


def serve(config: Config, out: Path, door: Door, watch: Watch = Watch(), lost: Lost = lambda: None) -> Record:
    """Train a config with real sites, in a new run folder."""
    server.check(config)
    sites = roster(config, door)
    door.check(sites)
    with RunFolder.create(out, config.to_dict()) as folder:
        folder.write("door", {**door.to_dict(), "sites": sites})
        return _serve(config, folder, door, sites, watch, lost)


def resume(path: Path, watch: Watch = Watch()) -> Record:
    """Go on with a run of `serve` from its folder; sites that still run connect again by themselves."""
    with RunFolder.open(path) as folder:
        result = folder.read("result")
        if result is not None:
            watch.notify(f"{path} is finished already")
            return result
        written = folder.read("door")
        if written is None:
            raise CheckpointError(f"{path} is not a run with real sites: it has no door.json")
        # The sites are those of the first start: a site that got its key later is not part of this run.
        door, sites = Door.from_dict(written), tuple(written["sites"])
        if door.certs is not None and not door.certs.is_dir():
            raise ConfigError(f"{path} was served with {door.certs}, which is gone; a try-out cannot be resumed")
        door.check(sites)
        return _serve(Config.from_dict(folder.config), folder, door, sites, watch)


def roster(config: Config, door: Door) -> tuple[str, ...]:
    """The names of the expected sites: those in the config, or all that have a key."""
    named = config.deploy.sites
    if named is None and door.certs is None:
        raise ConfigError(
            "deploy.sites is missing: without keys, the sites must be named, such as ['site_a', 'site_b']"
        )
    known = [key.stem for key in (door.certs / "sites").glob("*.pub")] if door.certs is not None else []
    if not (named or known):
        raise ConfigError(f"--certs {door.certs}: there is no key in sites/; `equipoise certs` makes them")
    return tuple(sorted(named or known))


def _serve(
    config: Config,
    folder: RunFolder,
    door: Door,
    sites: tuple[str, ...],
    watch: Watch,
    lost: Lost = lambda: None,
) -> Record:
    limit = config.deploy.message_mib << 20
    try:
        with link(door, sites, folder.path / "logs", limit, watch.notify, lost) as (carrier, names):
            watch.notify(f"sites join at {door.address}")
            return server.train(config, folder, carrier, names, watch, sites)
    except CarrierLost as error:
        raise CarrierLost(f"{error}; `equipoise resume {folder.path}` goes on from the last checkpoint") from error
