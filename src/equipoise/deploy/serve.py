"""The server: a run as `equipoise run` makes it, whose clients are sites that join over the network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from equipoise.config import Config
from equipoise.deploy import server
from equipoise.deploy.carrier import CarrierLost
from equipoise.deploy.link import Door, link
from equipoise.errors import CheckpointError, ConfigError
from equipoise.experiment import Record
from equipoise.folder import RunFolder
from equipoise.runs import Watch

Lost = Callable[[], str | None]  # why the run cannot go on; None while it can


def serve(config: Config, out: Path, door: Door, watch: Watch = Watch(), lost: Lost = lambda: None) -> Record:
    """Carry out a config with real sites, in a new folder."""
    server.check(config)
    sites = roster(config, door)
    door.check(sites)
    with RunFolder.create(out, config.to_dict()) as folder:
        folder.write("door", {**door.to_dict(), "sites": sites})
        return _carry_out(config, folder, door, sites, watch, lost)


def resume(path: Path, watch: Watch = Watch()) -> Record:
    """Go on with such a run; sites that are waiting come back by themselves."""
    with RunFolder.open(path) as folder:
        result = folder.read("result")
        if result is not None:
            watch.say(f"{path} is finished already")
            return result
        written = folder.read("door")
        if written is None:
            raise CheckpointError(f"{path} is not a run with real sites: it has no door.json")
        # A site that was given a key since then is not part of this run.
        door, sites = Door.from_dict(written), tuple(written["sites"])
        if door.certs is not None and not door.certs.is_dir():
            raise ConfigError(f"{path} was served with {door.certs}, which is gone; a try-out cannot be resumed")
        door.check(sites)
        return _carry_out(Config.from_dict(folder.config), folder, door, sites, watch)


def roster(config: Config, door: Door) -> tuple[str, ...]:
    """Who is expected: the sites of the config, or all that have a key."""
    named = config.deploy.sites
    if named is None and door.certs is None:
        raise ConfigError(
            "deploy.sites is missing: without keys, the sites must be named, such as ['site_a', 'site_b']"
        )
    known = [key.stem for key in (door.certs / "sites").glob("*.pub")] if door.certs is not None else []
    if not (named or known):
        raise ConfigError(f"--certs {door.certs}: there is no key in sites/; `equipoise certs` makes them")
    return tuple(sorted(named or known))


def _carry_out(
    config: Config,
    folder: RunFolder,
    door: Door,
    sites: tuple[str, ...],
    watch: Watch,
    lost: Lost = lambda: None,
) -> Record:
    limit = config.deploy.message_mib << 20
    try:
        with link(door, sites, folder.path / "logs", limit, watch.say, lost) as (carrier, names):
            watch.say(f"sites join at {door.address}")
            return server.train(config, folder, carrier, names, watch, sites)
    except CarrierLost as error:
        raise CarrierLost(f"{error}; `equipoise resume {folder.path}` goes on from the last checkpoint") from error
