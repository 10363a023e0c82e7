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
  description = "A host: a3-highgpu-8g, a3-ultragpu-8g, a4-highgpu-8g, a2-ultragpu-8g."
  type        = string
  default     = "a3-highgpu-8g"
  validation {
    condition     = can(regex("^a[234]-[a-z]+gpu-[1248]g$", var.machine))
    error_message = "A host with GPUs looks like a3-highgpu-8g."
  }
}

variable "hosts" {
  description = "How many there are."
  type        = number
  default     = 1
  validation {
    condition     = var.hosts >= 1 && floor(var.hosts) == var.hosts
    error_message = "One host or more."
  }
}

variable "image" {
  description = "The system they start with, drivers included."
  type        = string
  default     = "projects/ubuntu-os-accelerator-images/global/images/family/ubuntu-accelerator-2404-amd64-with-nvidia-580"
}
