# on each host, before the run: a Python of its own, the versions of the lock and no others, dtrain's wheel;
# what hangs is ended, as a set-up that fails ends the job and deletes the machines
timeout -k 60 1800 bash -euc '
  uv="$HOME/.local/bin/uv" # which SkyPilot installs
  python=@VENV@
  rm -rf ~/.dtrain/venv
  "$uv" venv --python @PYTHON@ ~/.dtrain/venv
  "$uv" pip install --python "$python" --require-hashes -r ~/.dtrain/lock.txt
  "$uv" pip install --python "$python" --no-deps ~/.dtrain/@WHEEL@
  "$uv" pip check --python "$python"
'
