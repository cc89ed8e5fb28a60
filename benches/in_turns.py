"""Two versions of `overdrive-versus` in turns, sample by sample, so that both meet the same disturbances:

    export LIBTORCH=$PWD/.libtorch/torch OVERDRIVE_PYTHON=$PWD/.libtorch/bin/python
    .cargo/with-libtorch python3 benches/in_turns.py OLD NEW loader --only images --pairs 15

OLD and NEW are the programs, built with `--release`; the rest is the case and its options. Each runs in a folder of its own,
`target/in-turns/old` and `new`, where it makes its data. Prints for each way of ours the samples of the new version as a share
of the old one's, the median and the whole interval: of rates, more than 1 is faster; of times, less. The last line has all
samples as JSON. Ways that only NEW has are left out; those that only OLD has end the pairs.
"""

import json
import os
import statistics
import subprocess
import sys


class Version:
    def __init__(self, name, program, arguments):
        folder = os.path.abspath(os.path.join("target", "in-turns", name))
        os.makedirs(os.path.join(folder, "target"), exist_ok=True)
        environment = {**os.environ, "OVERDRIVE_VERSUS_IN_TURNS": "1"}
        with open(os.path.join(folder, "log"), "w") as log:
            self.child = subprocess.Popen([os.path.abspath(program), *arguments], cwd=folder, env=environment, stderr=log,
                                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.next = None
        self.advance()

    def said(self, word):
        """What follows this word in the next line that has it; None at the end."""
        for line in self.child.stdout:
            if line.startswith(f'{{"{word}":'):
                return json.loads(line)[word]
        return None

    def advance(self):
        found = self.said("next")
        self.next = tuple(found) if found else None

    def sample(self):
        self.child.stdin.write("\n")
        self.child.stdin.flush()
        value = self.said("sample")
        self.advance()
        return value


def main(old, new, *arguments):
    versions = [Version("old", old, arguments), Version("new", new, arguments)]
    pairs = {}
    turn = 0
    while any(version.next for version in versions):
        first, second = versions if turn % 2 else versions[::-1]
        turn += 1
        if first.next == second.next:
            what, way, number = first.next
            values = {version: version.sample() for version in (first, second)}
            if number > 0 and None not in values.values():
                pairs.setdefault((what, way), []).append([values[version] for version in versions])
            continue
        # A way that only one of them has.
        (versions[1] if versions[1].next else versions[0]).sample()
    failed = [version.child.wait() for version in versions]
    for (what, way), both in pairs.items():
        ratios = sorted(after / before for before, after in both)
        middle = statistics.median(ratios)
        print(f"{what}, {way}: new/old {middle:.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f}), n = {len(both)}")
    print(json.dumps([[what, way, both] for (what, way), both in pairs.items()]))
    return max(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) > 3 else __doc__)
