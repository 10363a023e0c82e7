variable "project" {
  description = "The Google Cloud project."
  type        = string
  validation {
    condition     = can(regex("^[a-z][-a-z0-9]{4,28}[a-z0-9]$", var.project))
    error_message = "A project is 6 to 30 lower-case letters, digits and hyphens."
  }
}

variable "region" {
  description = "Of the cluster, as us-east5."
  type        = string
  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+$", var.region))
    error_message = "A region looks like us-east5; a zone has a letter more."
  }
}

variable "name" {
  description = "Of the cluster."
  type        = string
  default     = "dtrain"
}

variable "network" {
  description = "The network's id, as the module `network` gives it."
  type        = string
}

variable "subnetwork" {
  description = "The subnetwork's id, with ranges called pods and services."
  type        = string
}

variable "service_account" {
  description = "Who the nodes are: an address, as the module `service_account` gives it."
  type        = string
}

variable "control_plane" {
  description = "Addresses of the control plane: 16 of them, used by nothing else."
  type        = string
  default     = "172.16.0.0/28"
  validation {
    condition     = can(cidrhost(var.control_plane, 0)) && endswith(var.control_plane, "/28")
    error_message = "A range of 16 addresses, as 172.16.0.0/28."
  }
}

variable "operators" {
  description = "Addresses from which kubectl may be used, by a name of your own: { office = \"203.0.113.0/24\" }."
  type        = map(string)
  validation {
    condition     = alltrue([for range in values(var.operators) : can(cidrhost(range, 0)) && range != "0.0.0.0/0"])
    error_message = "Each is a range of addresses, and not the whole world."
  }
}

variable "pods" {
  description = "The Kubernetes service account that acts as `service_account`, as `launch: {namespace, account}` name it."
  type        = object({ namespace = string, account = string })
  default     = { namespace = "default", account = "default" }
}

variable "protected" {
  description = "Whether `terraform destroy` leaves the cluster alone."
  type        = bool
  default     = false
}

variable "pools" {
  description = <<-EOT
    Accelerators by a name of your own. A slice of TPUs: machine, hosts, topology; slices of them, each a pool of its own.
    GPUs: machine, hosts, gpu.
  EOT
  type = map(object({
    zone        = string
    machine     = string
    hosts       = number
    slices      = optional(number, 1)
    topology    = optional(string)
    gpu         = optional(object({ type = string, count = number }))
    spot        = optional(bool, false)
    reservation = optional(string)
  }))
  default = {}
  validation {
    condition     = alltrue([for pool in values(var.pools) : (pool.topology == null) != (pool.gpu == null)])
    error_message = "A pool has either a topology, of TPUs, or a gpu."
  }
  validation {
    condition     = alltrue([for pool in values(var.pools) : pool.topology == null || can(regex("^[0-9]+x[0-9]+(x[0-9]+)?$", pool.topology))])
    error_message = "A topology looks like 4x4, or 4x4x8."
  }
  validation {
    condition     = alltrue([for pool in values(var.pools) : !(startswith(pool.machine, "tpu7x") && pool.hosts > 1)])
    error_message = "Slices of several tpu7x hosts need a workload policy, which this module does not make yet."
  }
  validation {
    condition     = alltrue([for pool in values(var.pools) : pool.hosts >= 1 && pool.slices >= 1])
    error_message = "A pool has at least one host and one slice."
  }
  validation {
    condition     = alltrue([for pool in values(var.pools) : !(pool.spot && pool.reservation != null)])
    error_message = "A reservation is not spot."
  }
}
