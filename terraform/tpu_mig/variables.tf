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

variable "machine" {
  description = "A host of the slice: ct6e-standard-4t, ct5p-hightpu-4t, tpu7x-standard-4t."
  type        = string
  validation {
    condition     = can(regex("^(ct6e-standard|ct5p-hightpu|tpu7x-standard)-[148]t$", var.machine))
    error_message = "Groups are made of v5p, v6e and TPU7x: ct5p-hightpu-4t, ct6e-standard-4t, tpu7x-standard-4t."
  }
}

variable "hosts" {
  description = "How many there are."
  type        = number
  validation {
    condition     = var.hosts >= 1 && floor(var.hosts) == var.hosts
    error_message = "A slice has one host or more."
  }
}

variable "topology" {
  description = "How the chips of several hosts are joined, as 4x4; null where there is one host."
  type        = string
  default     = null
  validation {
    condition     = (var.topology == null) == (var.hosts == 1)
    error_message = "Several hosts are one slice by their topology; one host has none."
  }
}

variable "image" {
  description = "The system they start with."
  type        = string
  default     = "projects/ubuntu-os-accelerator-images/global/images/family/ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
}
