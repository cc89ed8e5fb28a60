"""PyTorch's side of `versus checkpoint`. Answers each line, such as `save 1` or `load 1`, with the seconds taken."""

import json
import os
import shutil
import sys
import time

import torch
import torch.distributed.checkpoint as dcp


def main():
    options = json.loads(sys.argv[1])
    path = options["path"]
    params = [torch.randn(shape, requires_grad=True) for shape in options["shapes"]]
    optimizer = torch.optim.AdamW(params, fused=True)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()

    def state():
        model = {str(at): param.detach() for at, param in enumerate(params)}
        return {"model": model, "optimizer": optimizer.state_dict()}

    def save():
        with open(path + ".aside", "wb") as file:
            torch.save(state(), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".aside", path)

    def load(**options):
        saved = torch.load(path, weights_only=True, **options)
        with torch.no_grad():
            for at, param in enumerate(params):
                param.copy_(saved["model"][str(at)])
        optimizer.load_state_dict(saved["optimizer"])

    def async_save():
        """Times the call alone, which stalls training. The write in the background is waited for, but not timed."""
        folder = path + ".async"
        shutil.rmtree(folder, ignore_errors=True)
        started = time.perf_counter()
        written = dcp.async_save(state(), checkpoint_id=folder, no_dist=True)
        stalled = time.perf_counter() - started
        written.result()
        return stalled

    def timed(run):
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    def timed_from_memory(run):
        """Reads the file first, as our side does, so that the disk does not count."""
        if not os.path.exists(path):
            save()
        with open(path, "rb") as file:
            while file.read(1 << 24):
                pass
        return timed(run)

    measures = {
        "save": lambda: timed(save),
        "load": lambda: timed_from_memory(load),
        "load_mmap": lambda: timed_from_memory(lambda: load(mmap=True)),
        "async_save": async_save,
    }
    print(torch.__version__, flush=True)
    for line in sys.stdin:
        name, count = line.split()
        print(sum(measures[name]() for _ in range(int(count))), flush=True)


if __name__ == "__main__":
    main()
