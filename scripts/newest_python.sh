#!/bin/sh
# Prints the newest CPython >= 3.11 that really starts: a version manager's shim may answer without a Python behind it.
for minor in 16 15 14 13 12 11; do
    for candidate in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.$minor.*/bin/python3; do
        if "$candidate" -c 'import venv' >/dev/null 2>&1; then
            echo "$candidate"
            exit 0
        fi
    done
done
echo "no Python 3.11 or newer was found" >&2
exit 1
