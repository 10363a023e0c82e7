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
  default     = "us-east5"
}

variable "zone" {
  description = "Of the chips, in the region."
  type        = string
  default     = "us-east5-b"
}

variable "hosts" {
  description = "Hosts of eight GPUs each."
  type        = number
  default     = 2
}
