"""A serving process: follows a model with `exporters.Replica`, and answers questions on stdin.

A line ``version keys_file answer_file`` waits for the version, looks the keys up and writes the
rows. It stands for a service that must load neither TensorFlow nor Numba.
"""

import sys

import numpy as np

from exporters import Replica


def main() -> None:
    """Follow until stdin ends."""
    url, model = sys.argv[1:]
    replica = Replica(url, model=model).start(timeout_s=0)
    try:
        sys.stdout.write("following\n")
        sys.stdout.flush()
        for line in sys.stdin:
            version, keys_file, answer_file = line.split()
            replica.wait_for(int(version), timeout_s=60)
            answers = {}
            with np.load(keys_file, allow_pickle=False) as keys:
                for table in keys.files:
                    rows, found = replica.lookup(table, keys[table])
                    answers[f"{table}.rows"], answers[f"{table}.found"] = rows, found
                    answers[f"{table}.size"] = np.array(replica.rows(table))
            np.savez(answer_file, **answers)
            heavy = [name for name in ("tensorflow", "numba") if name in sys.modules]
            sys.stdout.write(f"{replica.version} {','.join(heavy) or 'light'}\n")
            sys.stdout.flush()
    finally:
        replica.stop()


if __name__ == "__main__":
    main()
