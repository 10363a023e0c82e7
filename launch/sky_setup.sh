# On each host, before the run: a virtual environment with exactly the versions of the lock file, and dtrain's wheel.
# The timeout ends a set-up that hangs: a failed set-up ends the job and deletes the machines.
timeout -k 60 1800 bash -euc '
  uv="$HOME/.local/bin/uv" # installed by SkyPilot
  python=@VENV@
  rm -rf ~/.dtrain/venv
  "$uv" venv --python @PYTHON@ ~/.dtrain/venv
  "$uv" pip install --python "$python" --require-hashes -r ~/.dtrain/lock.txt
  "$uv" pip install --python "$python" --no-deps ~/.dtrain/@WHEEL@
  "$uv" pip check --python "$python"
'
