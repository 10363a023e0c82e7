output "launch" {
  description = "Fields of the recipe's `launch` section; `wheel` or `image` is said there."
  value = {
    kind       = var.kind
    on         = var.on
    spot       = var.spot
    project    = var.project
    zones      = [var.zone]
    bucket     = module.ground.bucket
    network    = module.ground.network.name
    subnetwork = module.ground.subnetwork.name
    account    = module.ground.account
  }
}
