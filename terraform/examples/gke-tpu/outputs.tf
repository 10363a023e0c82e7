output "credentials" {
  description = "The command that lets kubectl reach the cluster."
  value       = module.gke.credentials
}

output "launch" {
  description = "Fields of the recipe's `launch` section."
  value       = { kind = "gke", bucket = module.ground.bucket, context = module.gke.context, spot = var.spot, slices = var.slices }
}
