variable "project" {
  description = "The Google Cloud project."
  type        = string
  validation {
    condition     = can(regex("^[a-z][-a-z0-9]{4,28}[a-z0-9]$", var.project))
    error_message = "A project is 6 to 30 lower-case letters, digits and hyphens."
  }
}

variable "zone" {
  description = "Of the chips, as us-east5-b."
  type        = string
  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+-[a-z]$", var.zone))
    error_message = "A zone looks like us-east5-b; a region has no letter at the end."
  }
}

variable "name" {
  description = "What the machines are called."
  type        = string
  default     = "dtrain"
  validation {
    condition     = can(regex("^[a-z]([-a-z0-9]{0,50}[a-z0-9])?$", var.name))
    error_message = "A name is up to 52 lower-case letters, digits and hyphens, and begins with a letter."
  }
}

variable "network" {
  description = "The network's id, as the module `network` gives it."
  type        = string
}

variable "subnetwork" {
  description = "The subnetwork's id."
  type        = string
}

variable "service_account" {
  description = "Who the machines are: an address, as the module `service_account` gives it."
  type        = string
}

variable "spot" {
  description = "Whether they are spot: cheaper, and taken away at any time."
  type        = bool
  default     = false
}

variable "startup_script" {
  description = "What they do when they start; it is readable on them, so nothing secret."
  type        = string
  default     = ""
}

variable "accelerator_type" {
  description = "The slice, as the TPU API calls it: v5litepod-16, v6e-8."
  type        = string
  validation {
    condition     = can(regex("^(v4|v5litepod|v5p|v6e)-[0-9]+$", var.accelerator_type))
    error_message = "A slice looks like v5litepod-16; the TPU API serves v4, v5litepod, v5p and v6e."
  }
}

variable "runtime_version" {
  description = "The software of the TPU VMs; the usual one of the slice where not said."
  type        = string
  default     = null
}

variable "reserved" {
  description = "Whether they come from the project's reservation."
  type        = bool
  default     = false
  validation {
    condition     = !(var.reserved && var.spot)
    error_message = "Spot and reserved are two kinds of capacity: one of them."
  }
}
