#!/bin/bash
# What a machine of @NAME@ does at every start: mount the bucket, install dtrain, keep it running as a unit.
# Nothing in here is secret: it is kept as the machine's metadata, which everything on the machine can read.
set -Eeuo pipefail
bucket="@BUCKET@" image="@IMAGE@" wheel="@WHEEL@" extra="@EXTRA@"
runs=/mnt/dtrain home=/opt/dtrain
here=$runs/@NAME@/launch
fuse=https://github.com/GoogleCloudPlatform/gcsfuse/releases/download/v3.4.0/gcsfuse_3.4.0_amd64.deb

again() { # a command, until it succeeds: networks and package locks come late on a machine that starts
  for pause in 2 5 10 20 40 60; do "$@" && return; sleep "$pause"; done
  "$@"
}

apt() { # waiting for whoever else installs while a machine starts
  apt-get -o DPkg::Lock::Timeout=600 -y "$@"
}

install() { # with the versions of who launched it, or, where this python cannot have them, with the newest
  "$home/bin/pip" install --quiet -c "$here/constraints.txt" "$1" 2> /tmp/pip && return
  cat /tmp/pip >&2
  grep -qE "No matching distribution|ResolutionImpossible|requires a different Python" /tmp/pip &&
    "$home/bin/pip" install --quiet "$1"
}

# a machine that cannot begin is not kept
trap 'shutdown -h +10 "dtrain cannot be started"' ERR

if ! command -v gcsfuse >/dev/null; then
  again curl -fsSL -o /tmp/gcsfuse.deb "$fuse"
  again apt update
  again apt install /tmp/gcsfuse.deb
fi
mkdir -p "$runs"
# files are looked up anew each time, since other hosts write them
mountpoint -q "$runs" || again gcsfuse --implicit-dirs --metadata-cache-ttl-secs 0 -o allow_other "$bucket" "$runs"

if [ -n "$image" ]; then
  case "$image" in
    *-docker.pkg.dev/*) # by the machine's own account
      token=http://metadata.google.internal/computeMetadata/v1/instance/service-accounts/default/token
      again curl -fsS -H "Metadata-Flavor: Google" -o /run/token "$token"
      sed 's/.*"access_token":"\([^"]*\)".*/\1/' /run/token |
        docker login --username oauth2accesstoken --password-stdin "https://${image%%/*}"
      rm /run/token ;;
  esac
  again docker pull "$image"
  gpus=
  if [ "$extra" = cuda ]; then gpus="--gpus all"; fi
  python="/usr/bin/docker run --rm --name dtrain --privileged --network host $gpus --volume $runs:$runs --entrypoint python3 $image"
else
  python3=$(compgen -c | grep -E '^python3\.1[1-9]$' | sort -V | tail -n 1 || true)
  if [ -z "$python3" ] || ! "$python3" -c 'import ensurepip' 2>/dev/null; then
    again apt update
    again apt install python3.11 python3.11-venv
    python3=python3.11
  fi
  [ -x "$home/bin/python" ] || "$python3" -m venv "$home"
  again install "$here/$wheel${extra:+[$extra]}"
  python=$home/bin/python
fi

cat > /etc/systemd/system/dtrain.service <<UNIT
[Unit]
Description=dtrain: @NAME@
After=network-online.target
StartLimitIntervalSec=0
[Service]
Environment=HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/snap/bin
ExecStartPre=-/bin/sh -c 'shutdown -c'
ExecStart=$python @COMMAND@
# SIGTERM to the one that keeps the run, which has it save; the rest is killed when the time is over
KillMode=mixed
TimeoutStopSec=@GRACE@
# 75 is preempted, and a death may be: both are started again; 2 to 8 would come again
Restart=on-failure
RestartSec=5
RestartForceExitStatus=75
RestartPreventExitStatus=2 3 4 5 6 7 8
# over, and nobody took the machine away: it leaves by itself
ExecStopPost=/bin/sh -c 'case "\$EXIT_CODE-\$EXIT_STATUS" in exited-0 | exited-[2-8]) shutdown -h +10 dtrain is over;; esac'
UNIT
systemctl daemon-reload
systemctl start --no-block dtrain
