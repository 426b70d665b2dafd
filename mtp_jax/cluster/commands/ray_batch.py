"""`mtp-jax batch --ray`: the lines of a batch over several engines, by Ray Data.

Lines travel to the engines, and answers back, through the cluster's object store: only the model's folder is
shared. This process writes each line once. Another engine recomputes the lines of a lost engine.
"""

import json
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack

from mtp_jax.cluster.commands.ray_options import portable_options
from mtp_jax.cluster.on_ray.batches import BatchEngine
from mtp_jax.cluster.on_ray.options import RayOptions
from mtp_jax.cluster.on_ray.start import cluster, reservation
from mtp_jax.commands.batch import SLOTS, BatchWork, told
from mtp_jax.commands.batch_file import Answer, Job, Line, open_job
from mtp_jax.commands.options import model_dir
from mtp_jax.errors import EngineStopped
from mtp_jax.json_object import JsonObject

_ROWS_PER_SLOT = 8  # rows of a batch: fewer lose less work with an engine, more leave fewer slots idle


def answer_on_ray(options: RayOptions, work: BatchWork) -> str:
    """Answer the lines. Returns a summary. Raises ConfigError, RequestError, EngineStopped."""
    args, settings, counts = work.args, work.settings, work.counts
    engine = portable_options(args, SLOTS)
    size = args.in_flight or _ROWS_PER_SLOT * engine["max_num_seqs"]
    data, model = engine.get("mesh", (1, 1))
    given = {
        "model": model_dir(args).absolute(),
        "model_name": settings.names,
        "strict": settings.strict,
        "max_body_bytes": settings.max_body_bytes,
        **engine,
    }
    with open_job(args.source, args.target, counts) as job, ExitStack() as stack:
        with work.report.phase("join Ray"):
            own = stack.enter_context(cluster(options.ray_address))
        reserves = reservation(options, data * model, own=own)
        began = time.perf_counter()
        with work.report.phase("answer", "request") as update:
            _answer(job, size, options, reserves, given, lambda: update(counts.answered, work.lines))
        return told(counts, time.perf_counter() - began)


def _answer(
    job: Job,
    size: int,
    options: RayOptions,
    reserves: dict[str, float],
    engine: JsonObject,
    progress: Callable[[], None],
) -> None:
    import ray.data  # pyright: ignore[reportMissingImports]
    from ray.data import ActorPoolStrategy, DataContext  # pyright: ignore[reportMissingImports]

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    DataContext.get_current().enable_progress_bars = False
    blocks = _blocks(job, size)
    if not blocks:
        return
    answers = ray.data.from_arrow_refs(blocks).map_batches(
        BatchEngine,
        fn_constructor_kwargs=engine,
        batch_size=size,
        compute=ActorPoolStrategy(min_size=options.min_replicas, max_size=options.most),
        **{name: value for name, value in reserves.items() if value},
    )
    try:
        for row in answers.iter_rows():
            line = Line(int(row["number"]), json.loads(row["custom_id"]))
            answer = Answer(int(row["status"]), row["request_id"], json.loads(row["answer"]), row["warning"])
            job.write(line, answer)
            progress()
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise EngineStopped(f"the engines failed: {reason}; run the command again for the rest") from error


def _blocks(job: Job, size: int) -> list[object]:
    """Put the unanswered requests into the object store, in blocks; lines in error are written at once."""
    import pyarrow  # pyright: ignore[reportMissingImports]
    import ray  # pyright: ignore[reportMissingImports]

    found, rows = [], list[JsonObject]()

    def store() -> None:
        if rows:
            found.append(ray.put(pyarrow.Table.from_pylist(rows)))
            rows.clear()

    for line in job.lines():
        if line.error is not None:
            job.write(line, None)
            continue
        # A name may be invalid as text; JSON escapes it.
        name = json.dumps(line.custom_id)
        rows.append({"number": line.number, "custom_id": name, "url": line.url, "body": line.body.decode()})
        if len(rows) == size:
            store()
    store()
    return found
