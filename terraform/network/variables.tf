variable "project" {
  description = "The Google Cloud project."
  type        = string
  validation {
    condition     = can(regex("^[a-z][-a-z0-9]{4,28}[a-z0-9]$", var.project))
    error_message = "A project is 6 to 30 lower-case letters, digits and hyphens."
  }
}

variable "region" {
  description = "The region, as us-east5."
  type        = string
  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+$", var.region))
    error_message = "A region looks like us-east5; a zone has a letter at the end."
  }
}

variable "name" {
  description = "The name of the network and its resources. Two stacks in one project need two names."
  type        = string
  validation {
    condition     = can(regex("^[a-z]([-a-z0-9]{4,38}[a-z0-9])$", var.name))
    error_message = "A name is 6 to 40 lower-case letters, digits and hyphens, and begins with a letter."
  }
}

variable "range" {
  description = "IP addresses of machines."
  type        = string
  default     = "10.0.0.0/20"
  validation {
    condition     = can(cidrhost(var.range, 0))
    error_message = "A range looks like 10.0.0.0/20."
  }
}

variable "pods" {
  description = "IP addresses of pods."
  type        = string
  default     = "10.4.0.0/14"
  validation {
    condition     = can(cidrhost(var.pods, 0))
    error_message = "A range looks like 10.4.0.0/14."
  }
}

variable "services" {
  description = "IP addresses of Kubernetes services."
  type        = string
  default     = "10.8.0.0/20"
  validation {
    condition     = can(cidrhost(var.services, 0))
    error_message = "A range looks like 10.8.0.0/20."
  }
}
