# The startup script of a host of kind ssh, shared by `tpu`, `tpu_instances` and `gpu`: it mounts the bucket at /mnt/dtrain,
# installs dtrain from the wheel and the lock file, and writes the ready file last. It contains no secret: every
# process on a machine can read its metadata, and Terraform keeps it in the state.

locals {
  script = templatefile("${path.module}/startup.sh.tftpl", {
    bucket  = var.bucket
    wheel   = var.wheel
    lock    = var.lock
    python  = var.python
    tpu     = var.tpu == null ? "" : var.tpu
    minutes = var.hours == null ? 0 : ceil(var.hours * 60)
  })
}
