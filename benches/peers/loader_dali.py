"""DALI's side of `versus loader`. Answers each line `cpu EPOCHS` with the seconds that those epochs took.

Its CPU pipeline reads, decodes only the random region, scales (bilinear, with antialiasing) and flips on `workers`
threads, and reads two batches ahead. It needs no GPU.

It reads ahead after an epoch, too. An answer waits until that is done, so that DALI is idle while others are timed;
what was read ahead is taken before the time begins.
"""

import json
import sys
import time

try:
    import nvidia.dali as dali
    from nvidia.dali import fn, pipeline_def, types
except Exception as error:
    sys.exit(print(f"missing {type(error).__name__}: {error}".splitlines()[0], flush=True))

SIDE = 224
# Batches that are read ahead.
AHEAD = 2


@pipeline_def
def photographs(folder):
    files, labels = fn.readers.file(file_root=folder, random_shuffle=True, name="files")
    images = fn.decoders.image_random_crop(files, output_type=types.RGB)
    images = fn.resize(images, size=[SIDE, SIDE], interp_type=types.INTERP_LINEAR, antialias=True)
    images = fn.flip(images, horizontal=fn.random.coin_flip())
    return fn.transpose(images, perm=[2, 0, 1]), labels


def rest():
    """Waits until no thread of this process computes any more, two seconds at most."""
    before = time.process_time()
    for _ in range(40):
        time.sleep(0.05)
        now = time.process_time()
        if now - before < 0.005:
            break
        before = now


def main():
    options = json.loads(sys.argv[1])
    size = options["batch_size"]
    pipeline = photographs(
        options["photos"], batch_size=size, num_threads=options["workers"], device_id=None, prefetch_queue_depth=AHEAD)
    pipeline.build()
    images = pipeline.epoch_size("files")
    print(dali.__version__, flush=True)

    def epoch():
        seen = 0
        while seen < images:
            batch, _ = pipeline.run()
            assert batch.shape()[0] == (3, SIDE, SIDE) and batch.dtype == types.UINT8
            seen += len(batch)
        return seen / images

    for line in sys.stdin:
        _, count = line.split()
        for _ in range(AHEAD):
            pipeline.run()
        started = time.perf_counter()
        epochs = sum(epoch() for _ in range(int(count)))
        # Its last batch runs on into the next epoch.
        seconds = (time.perf_counter() - started) * int(count) / epochs
        rest()
        print(seconds, flush=True)


if __name__ == "__main__":
    main()
