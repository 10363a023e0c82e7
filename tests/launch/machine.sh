# A machine that starts: FOLDER/startup.sh as it stands and a real systemd, in namespaces of their own, over a root that
# cannot be written to. Programs that would go to the network are those of FOLDER/bin; the bucket is FOLDER/bucket.
set -e
folder=$1 root=$1/root
mkdir -p "$root"
mount --bind / "$root"
mount -o remount,ro,bind "$root"
for one in proc sys dev; do mount --rbind "/$one" "$root/$one"; done
for one in run var tmp mnt opt etc/systemd/system usr/local/sbin; do mount -t tmpfs tmpfs "$root/$one"; done
mkdir -p "$root/run/lock" "$root/run/systemd/system/dtrain.service.d" "$root/mnt/dtrain" "$root/tmp/machine"
mount --bind "$folder/bucket" "$root/mnt/dtrain"
mount --bind "$folder" "$root/tmp/machine"
cp "$folder/bin/shutdown" "$root/usr/local/sbin/"
PATH=/tmp/machine/bin:$PATH chroot "$root" bash /tmp/machine/startup.sh
cp "$root/etc/systemd/system/dtrain.service" "$folder/"
# nothing but this unit: what else a system starts with would need more than a read-only root
sed '/^After=/d' "$folder/dtrain.service" > "$root/etc/systemd/system/dtrain.service"
printf '[Unit]\nDefaultDependencies=no\n' > "$root/run/systemd/system/dtrain.service.d/alone.conf"
printf '[Unit]\nDefaultDependencies=no\nWants=dtrain.service\n' > "$root/run/systemd/system/alone.target"
export container=test
exec chroot "$root" /lib/systemd/systemd --system --unit=alone.target --log-target=console --show-status=no
