variable "project" {
  description = "The Google Cloud project."
  type        = string
}

variable "bucket" {
  description = "A name for the bucket, unique in the world."
  type        = string
}

variable "region" {
  description = "Of all of it."
  type        = string
}

variable "secrets" {
  description = "Secrets of Secret Manager that the machines may read, by name."
  type        = list(string)
  default     = []
}

variable "keeper" {
  description = "Whether the machines give themselves back: `launch` of kind tpu-vm, queued and group."
  type        = bool
  default     = false
}
