"""The routes of Tinker's `RestClient` to what a state keeps: training runs, sessions, checkpoints;
a checkpoint's files, in an archive or one by one.

An archive is a tar file, the same bytes each time it is asked for: an adapter's is what PEFT and
vLLM load. `tinker checkpoint download` has a checkpoint saved to be taken away, asks for links to
its files, and fetches these. Left out: publishing and projects.
"""

import asyncio
import os
import tarfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from isobit.errors import brief
from isobit.serve.gateway import Gateway, Refused, in_thread
from isobit.serve.requests import BadRequest
from isobit.serve.state.rows import Checkpoint, CheckpointName, StoredRun
from isobit.serve.state.state import State, deleted
from isobit.serve.tinker.links import SECONDS, Links
from isobit.serve.tinker.protocol import SetTtl
from isobit.serve.wire import read_request

_MOST_LISTED, _BLOCK = 1000, 1 << 18
_MOST_OPEN, _MOST_OF_A_TENANT, _MOST_CHECKED = 192, 64, 2
"""The most files that are sent at the same time, fewer than the descriptors that a server keeps for
itself (`connections.py`); the most of one tenant; the most checkpoints that are checked at the same
time."""


class Archive:
    """The routes over a state."""

    def __init__(self, gateway: Gateway, state: State) -> None:
        self._gateway, self._state, self._links = gateway, state, Links()
        self._open = Counter[str]()  # files that are sent, of each tenant
        self._checking = asyncio.Semaphore(_MOST_CHECKED)

    async def runs(self, request: Request) -> Response:
        """Answer with a tenant's training runs, the newest first."""
        limit, offset = _page(request, 20)
        rows, count = await in_thread(self._state.runs, request.state.tenant, limit, offset)
        listed = [await in_thread(self._run_value, run) for run in rows]
        return JSONResponse({"training_runs": listed, "cursor": _cursor(limit, offset, count)})

    async def run(self, request: Request) -> Response:
        """Answer with the description of a training run."""
        return JSONResponse(await in_thread(self._run_value, await self._find(request)))

    async def checkpoints(self, request: Request) -> Response:
        """Answer with the checkpoints that a run has saved."""
        run = await self._find(request)
        saved, _ = await in_thread(self._state.checkpoints, run.tenant, run.id)
        return JSONResponse({"checkpoints": [_value(checkpoint) for checkpoint in saved]})

    async def all_checkpoints(self, request: Request) -> Response:
        """Answer with the checkpoints that a tenant's runs have saved, the newest first."""
        limit, offset = _page(request, 100)
        tenant = request.state.tenant
        saved, count = await in_thread(self._state.checkpoints, tenant, None, limit, offset)
        values = [_value(checkpoint) for checkpoint in saved]
        return JSONResponse({"checkpoints": values, "cursor": _cursor(limit, offset, count)})

    async def delete(self, request: Request) -> Response:
        """Drop a checkpoint. Sampling clients that have it keep it until they end."""
        await in_thread(self._state.delete, request.state.tenant, _name(request))
        return Response(status_code=204)

    async def set_ttl(self, request: Request) -> Response:
        """Set the seconds after which a checkpoint is dropped; null: never."""
        ttl = (await read_request(request, SetTtl, self._gateway.limits)).ttl_seconds
        await in_thread(self._state.set_ttl, request.state.tenant, _name(request), ttl)
        return Response(status_code=204)

    async def download(self, request: Request) -> Response:
        """Answer with a checkpoint's files, as a tar."""
        tenant, name = request.state.tenant, _name(request)
        checkpoint = await in_thread(self._state.checkpoint, tenant, name)
        with ExitStack() as held:
            opened = await self._opened(tenant, checkpoint, held)
            files = [(_entry(name, file, checkpoint), file) for name, file in opened.items()]
            size = sum(512 + -(-entry.size // 512) * 512 for entry, _ in files) + 1024
            file = f"{checkpoint.run.replace(':', '-')}-{checkpoint.name}.tar"
            headers = {
                "Content-Length": str(size),
                "Content-Disposition": f'attachment; filename="{file}"',
            }
            sent = held.pop_all()  # the answer closes them
        return _Download(_tar(files), "application/x-tar", headers, sent)

    async def urls(self, request: Request) -> Response:
        """Answer with a link to each file of a checkpoint that was saved to be taken away."""
        name = _name(request)
        if name.kind != "external":
            raise BadRequest(
                f"{brief(name.checkpoint_id, 200)}: expected external_weights/NAME, which "
                "save_weights_external makes",
                "checkpoint_id",
            )
        checkpoint = await in_thread(self._state.checkpoint, request.state.tenant, name)
        paths = await self._paths(checkpoint)
        expires, origin = int(time.time()) + SECONDS, _origin(request)
        urls = {file: origin + self._links.link(checkpoint.id, file, expires) for file in paths}
        return JSONResponse({"urls": urls, "expires": _time(expires)})

    async def file(self, request: Request) -> Response:
        """Answer with a file, for a client that has a link to it."""
        of, name = (request.path_params[key] for key in ("checkpoint", "file"))
        self._links.check(of, name, request.query_params)
        await in_thread(self._state.drop_expired)
        checkpoint = await in_thread(self._state.by_id, of)
        if checkpoint is None:
            raise BadRequest("the checkpoint of this link was deleted", status=404)
        run = await in_thread(self._state.run, checkpoint.run)
        with ExitStack() as held:
            tenant = "" if run is None else run.tenant
            (file,) = (await self._opened(tenant, checkpoint, held, name)).values()
            headers = {"Content-Length": str(os.fstat(file.fileno()).st_size)}
            sent = held.pop_all()  # the answer closes it
        return _Download(_blocks(file), "application/octet-stream", headers, sent)

    async def _paths(self, checkpoint: Checkpoint) -> dict[str, Path]:
        """Return the paths of a checkpoint's files by their names, checked to be those that were
        written. A few checkpoints are checked at a time, so that other requests get to the disk
        too. Raises as `State.folder_of`."""
        async with self._checking:
            return _files(await in_thread(self._state.folder_of, checkpoint))

    async def _opened(
        self, tenant: str, checkpoint: Checkpoint, held: ExitStack, only: str | None = None
    ) -> dict[str, IO[bytes]]:
        """Open a checkpoint's files, or the `only` one, and return them by their names: open until
        `held` is closed, and readable even if they are deleted meanwhile. Raises BadRequest where
        they were deleted before, Refused as `_take`."""
        paths = await self._paths(checkpoint)
        names = [name for name in paths if only in (None, name)]
        self._take(tenant, len(names), held)

        def opened() -> dict[str, IO[bytes]]:
            files = dict[str, IO[bytes]]()
            with suppress(FileNotFoundError):
                files = {name: held.enter_context(paths[name].open("rb")) for name in names}
            if not files or self._state.by_id(checkpoint.id) is None:  # files go after their row
                raise deleted(checkpoint)
            return files

        return await in_thread(opened)

    def _take(self, tenant: str, count: int, held: ExitStack) -> None:
        """Count `count` more files of a tenant as open until `held` is closed. Raises Refused (429)
        where the tenant has open files and they would be too many."""
        mine, together = self._open[tenant], self._open.total()
        if mine and (mine + count > _MOST_OF_A_TENANT or together + count > _MOST_OPEN):
            raise Refused(429, "too many downloads are open; ask again when some have ended")
        self._open[tenant] += count
        held.callback(self._open.subtract, {tenant: count})

    async def sessions(self, request: Request) -> Response:
        """Answer with a tenant's sessions that have not ended, the newest first."""
        limit, offset = _page(request, 20)
        rows = await in_thread(self._state.sessions, request.state.tenant, limit, offset)
        return JSONResponse({"sessions": [session.id for session in rows]})

    async def session(self, request: Request) -> Response:
        """Answer with the runs, sampling clients and metadata of a session."""
        name = request.path_params["name"]
        stored = await in_thread(self._state.session, name)
        if stored is None or stored.tenant != request.state.tenant:
            raise BadRequest(f"no session {brief(name)}: it has ended", status=404)
        runs = await in_thread(self._state.runs_of, name)
        samplers = await in_thread(self._state.samplers, name)
        value = {
            "training_run_ids": [run.id for run in runs],
            "sampler_ids": [sampler.id for sampler in samplers],
            "user_metadata": dict(stored.metadata) or None,
            "display_name": stored.display_name,
        }
        return JSONResponse(value)

    async def _find(self, request: Request) -> StoredRun:
        name = request.path_params["run"]
        stored_run = await in_thread(self._state.run, name)
        if stored_run is None or stored_run.tenant != request.state.tenant:
            raise BadRequest(f"no training run {brief(name)}", status=404)
        return stored_run

    def _run_value(self, run: StoredRun) -> dict[str, Any]:
        saved, _ = self._state.checkpoints(run.tenant, run.id)

        def last(kind: str) -> Any:
            return next((_value(c) for c in saved if c.kind == kind), None)

        return {
            "training_run_id": run.id,
            "base_model": run.base,
            "model_owner": f"tenant-{run.tenant}",
            "is_lora": run.rank is not None,
            "lora_rank": run.rank,
            "last_request_time": _time(run.requested),
            "last_checkpoint": last("training"),
            "last_sampler_checkpoint": last("sampler"),
            "user_metadata": dict(run.metadata) or None,
        }


def _value(checkpoint: Checkpoint) -> dict[str, Any]:
    expires = checkpoint.expires
    name = CheckpointName(checkpoint.run, checkpoint.kind, checkpoint.name)
    return {
        "checkpoint_id": name.checkpoint_id,
        "checkpoint_type": checkpoint.kind,
        "time": _time(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.bytes,
        "public": False,
        "user_metadata": dict(checkpoint.metadata) or None,
        "expires_at": None if expires is None else _time(expires),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _name(request: Request) -> CheckpointName:
    return CheckpointName.within(request.path_params["run"], request.path_params["checkpoint"])


def _page(request: Request, default: int) -> tuple[int, int]:
    """Return the (limit, offset) of a request for a list. Raises BadRequest for other than whole
    numbers."""
    numbers = []
    for key, value in (("limit", default), ("offset", 0)):
        text = request.query_params.get(key, str(value))
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise BadRequest(f"{key}: expected a whole number, got {brief(text)!r}", key)
        numbers.append(int(text))
    return min(numbers[0], _MOST_LISTED), numbers[1]


def _cursor(limit: int, offset: int, count: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": count}


def _entry(name: str, file: IO[bytes], checkpoint: Checkpoint) -> tarfile.TarInfo:
    """Return the header of a file in an archive."""
    entry = tarfile.TarInfo(name)
    entry.size = os.fstat(file.fileno()).st_size
    entry.mode, entry.mtime = 0o600, int(checkpoint.created)
    return entry


def _files(folder: Path) -> dict[str, Path]:
    """Return the paths of the files of a checkpoint that clients get, by their names in its
    folder."""
    return {
        str(path.relative_to(folder)): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


class _Download(StreamingResponse):
    """A response of some pieces. It closes `held` at its end, whether it was read or not."""

    def __init__(
        self, pieces: AsyncIterator[bytes], kind: str, headers: dict[str, str], held: ExitStack
    ) -> None:
        super().__init__(pieces, media_type=kind, headers=headers)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await super().__call__(scope, receive, send)


async def _blocks(file: IO[bytes]) -> AsyncIterator[bytes]:
    while block := await in_thread(file.read, _BLOCK):
        yield block


def _origin(request: Request) -> str:
    """Return the scheme, host and port by which a client calls this server. Raises BadRequest for
    an invalid header Host."""
    try:
        return f"{request.url.scheme}://{request.url.netloc}"
    except ValueError:
        raise BadRequest("the header Host is none") from None


async def _tar(files: list[tuple[tarfile.TarInfo, IO[bytes]]]) -> AsyncIterator[bytes]:
    for entry, file in files:
        yield entry.tobuf(tarfile.GNU_FORMAT)  # which has files of 8 GiB and more
        async for block in _blocks(file):
            yield block
        yield b"\0" * (-entry.size % 512)
    yield b"\0" * 1024
