locals {
  hosts     = sort([for url in data.google_compute_instance_group.slice.instances : basename(url)])
  addresses = [for host in local.hosts : "${host}.${var.zone}.c.${var.project}.internal"]
  proxy     = "gcloud compute start-iap-tunnel %h 22 --listen-on-stdin --zone ${var.zone} --project ${var.project}"
  setup = join("\n", concat(
    ["[ -f ~/.ssh/google_compute_engine ] || ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/google_compute_engine"],
    ["gcloud compute os-login ssh-keys add --key-file ~/.ssh/google_compute_engine.pub --project ${var.project}"],
    [module.host.reach],
    [for host in local.hosts : "reach '${local.proxy}' ${var.user}@${host}"],
  ))
}

output "launch" {
  description = "The recipe's `launch` section."
  value = merge(module.host.launch, {
    kind      = "ssh"
    hosts     = [for host in local.hosts : "${var.user}@${host}"]
    addresses = local.addresses
    proxy     = local.proxy
    identity  = "~/.ssh/google_compute_engine"
  })
}

output "setup" {
  description = "Commands to run once: they register the ssh key, and record the host keys through the tunnel."
  value       = local.setup
}
