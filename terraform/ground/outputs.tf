output "network" {
  description = "The network: id, and name as `launch.network` takes it."
  value       = { id = module.network.network, name = module.network.name }
}

output "subnetwork" {
  description = "The subnetwork: id, and name as `launch.subnetwork` takes it."
  value       = { id = module.network.subnetwork, name = module.network.subnetwork_name }
}

output "account" {
  description = "The address of who the machines are."
  value       = module.service_account.email
}

output "bucket" {
  description = "The bucket's name."
  value       = module.bucket.bucket
}
