class BaseModuleProtocol:
    pass
