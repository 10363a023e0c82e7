output "launch" {
  description = "The recipe's `launch` section."
  value       = module.gpu.launch
}

output "setup" {
  description = "Commands to run once after apply."
  value       = module.gpu.setup
}
