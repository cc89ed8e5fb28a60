"""Reads a snapshot as PyTorch's visualisers do: the one in Python, and what its page in a browser computes first."""
import base64
import pickle
import pickletools
import re
import sys

from torch.cuda import _memory_viz as viz

raw = open(sys.argv[1], "rb").read()

# The page's own reader takes no number of more than 8 bytes: LONG1 is a code, a length and these. It adds lists to lists as
# arguments of a call, of which there may be some 100,000.
ops = list(pickletools.genops(raw))
assert all(after[2] - op[2] <= 10 for op, after in zip(ops, ops[1:]) if op[0].name == "LONG1")
assert {op[0].name for op in ops} <= {
    "PROTO", "FRAME", "EMPTY_DICT", "EMPTY_LIST", "MARK", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "BININT", "BININT1",
    "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "NEWTRUE", "NEWFALSE", "NONE", "EMPTY_TUPLE", "TUPLE", "TUPLE1",
    "TUPLE2", "TUPLE3", "BINFLOAT", "MEMOIZE", "BINGET", "BINPUT", "LONG_BINGET", "LONG_BINPUT", "STOP",
}  # fmt: skip

# Pages embed the snapshot.
data = pickle.loads(raw)
for kind, page in [
    ("Active Memory Timeline", viz.trace_plot(data)),
    ("Active Cached Memory Timeline", viz.trace_plot(data, plot_segments=True)),
    ("Allocator State History", viz.segment_plot(data)),
]:
    embedded = re.search('"base64": "([^"]+)"', page)[1]
    assert repr(kind) in page and pickle.loads(base64.b64decode(embedded)) == data, kind

categories = [event["category"] for trace in data["device_traces"] for event in trace]
assert "unknown" in categories, "the page fails where there are categories, and not this one"
for device, trace in enumerate(data["device_traces"]):
    # The page goes back from the end, and looks for each block in its segment.
    segments, blocks = {}, {}
    for segment in (it for it in data["segments"] if it["device"] == device):
        segments[segment["address"]] = segment["total_size"]
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["state"] == "active_allocated" and block["requested_size"] == block["size"]
            blocks[at] = block["size"]
            at += block["size"]
    for event in reversed(trace):
        for at, size in blocks.items():
            assert size > 0 and any(start <= at < start + length for start, length in segments.items()), event
        assert event["stream"] == 0 and event["time_us"] > 1.7e15
        assert all(isinstance(frame["line"], int) and frame["name"] for frame in event["frames"])
        match event["action"]:
            case "alloc":
                assert blocks.pop(event["addr"]) == event["size"]
            case "segment_alloc":
                assert segments.pop(event["addr"]) == event["size"]
            case "free_requested":
                assert event["addr"] in blocks
            case "free_completed":
                blocks[event["addr"]] = event["size"]
            case "segment_free":
                segments[event["addr"]] = event["size"]
            case "snapshot":
                assert event["size"] == sum(blocks.values())
            case other:
                raise AssertionError(other)
    assert not segments and not blocks, "all blocks are allocated in the trace"

lines = lambda text: text
print(viz.segsum(data), viz.trace(data), viz.memory(data, lines), viz.segments(data, lines))
print(viz.compare(data["segments"], data["segments"], lines))
for trace in data["device_traces"]:
    for event in trace:
        places = ",".join(f"{frame['filename'].split('/')[-1]}:{frame['line']} {frame['name']}" for frame in event["frames"])
        print("EVENT", event["action"], event["category"], event["size"], places)
