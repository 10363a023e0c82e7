output "launch" {
  description = "Fields of the recipe's `launch` section; `wheel` or `image` is said there."
  value = {
    kind       = var.kind
    on         = var.on
    spot       = var.spot
    project    = var.project
    zones      = [var.zone]
    bucket     = module.bucket.bucket
    network    = module.network.name
    subnetwork = module.network.subnetwork_name
    account    = module.service_account.email
  }
}
