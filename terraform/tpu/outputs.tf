locals {
  addresses = google_tpu_v2_vm.this.network_endpoints[*].ip_address
  node      = "${google_tpu_v2_vm.this.name} --zone ${var.zone} --project ${var.project}"
  # only gcloud can resolve the names of workers: it tunnels to worker 0, which forwards to the address of each
  proxy = "gcloud alpha compute tpus tpu-vm ssh ${var.user}@${local.node} --worker 0 --tunnel-through-iap --quiet --ssh-flag=-W --ssh-flag=%h:22"
  setup = join("\n", concat(
    ["gcloud alpha compute tpus tpu-vm ssh ${var.user}@${local.node} --worker 0 --tunnel-through-iap --command true"],
    [module.host.reach],
    [for host in local.addresses : "reach '${local.proxy}' ${var.user}@${host}"],
  ))
}

output "launch" {
  description = "The recipe's `launch` section."
  value = merge(module.host.launch, {
    kind      = "ssh"
    hosts     = [for host in local.addresses : "${var.user}@${host}"]
    addresses = local.addresses
    proxy     = local.proxy
    identity  = "~/.ssh/google_compute_engine"
  })
}

output "setup" {
  description = "Commands to run once: they register the ssh key, and record the host keys through the tunnel."
  value       = local.setup
}
