# Reports to xtask what this Python is and which torch it imports, as one line of JSON. Needs only the standard library
# of any Python 3.
import importlib.util
import json
import sys


def imports(name):
    try:
        return __import__(name)
    except Exception:  # A broken package counts as missing.
        return None


torch = imports("torch")
print(json.dumps({
    "executable": sys.executable,
    "version": list(sys.version_info[:2]),
    "venv": imports("venv") is not None and imports("ensurepip") is not None,
    "torch": {"version": str(torch.__version__), "dir": list(torch.__path__)[0]} if torch else None,
    "lacks": [name for name in ("numpy", "torchvision", "PIL", "expecttest") if not importlib.util.find_spec(name)],
}))
