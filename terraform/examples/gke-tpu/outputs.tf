output "launch" {
  description = "The recipe's `launch` section."
  value = merge(module.gke.launch, {
    on     = "v6e-16"
    slices = var.slices
    spot   = var.spot
    image  = local.image
    bucket = module.bucket.bucket
  })
}

output "setup" {
  description = "Commands to run once after apply."
  value       = module.gke.setup
}
