"""A run that several processes share: take part in it, bring its layers to where they are trained, forecast it."""
