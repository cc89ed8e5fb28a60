# Tells xtask what this Python is and which torch it imports: one line of JSON. Needs only the standard library of any
# Python 3.
import importlib.util
import json
import sys


def imports(name):
    try:
        return __import__(name)
    except Exception:  # A package that is there but broken is as good as none.
        return None


torch = imports("torch")
print(json.dumps({
    "executable": sys.executable,
    "version": list(sys.version_info[:2]),
    "venv": imports("venv") is not None and imports("ensurepip") is not None,
    "torch": {"version": str(torch.__version__), "dir": list(torch.__path__)[0]} if torch else None,
    "lacks": [name for name in ("numpy", "torchvision", "PIL", "expecttest") if not importlib.util.find_spec(name)],
}))
