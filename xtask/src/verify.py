# Checks the environment that pip made: every file in the packages' lists exists with the right size, and the packages
# import. An interrupted pip leaves files that look installed but have the wrong size.
import importlib.metadata
import sys

bad = []
for package in importlib.metadata.distributions():
    if package.files is None:
        bad.append(f"{package.metadata['Name']}: no list of files")
        continue
    for file in package.files:
        try:
            whole = file.size is None or file.locate().stat().st_size == file.size
        except OSError:
            whole = False
        if not whole and file.suffix != ".pyc":
            bad.append(str(file))
if bad:
    sys.exit(f"{len(bad)} files missing or incomplete, {bad[0]} first")

try:
    import expecttest, numpy, PIL, torch, torchvision  # noqa: E401, F401
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
print(torch.__path__[0])
