output "launch" {
  description = "Fields of the recipe's `launch` section."
  value       = { kind = "ssh", hosts = module.gpu.hosts }
}
