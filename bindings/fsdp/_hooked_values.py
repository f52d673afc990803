"""What the shards of parameters that are tensor subclasses are cut from."""


def own(parameter, mesh, name):
    if mesh.device_type != parameter.device.type and not parameter.is_meta:
        return parameter.to(mesh.device_type)
    return parameter
