"""What a patch changes besides forwards: an attribute of an object, such as the attention that a config names."""

import weakref


class Setting:
    """One attribute, and which patches want it to be adze's. The last patch that is enabled decides."""

    def __init__(self):
        self.layers = []  # (handle, whether it wants it)

    def settle(self):
        wanted = [wants for handle, wants in self.layers if handle.enabled]
        self.set(bool(wanted and wanted[-1]))

    def set(self, wanted):
        """Makes it adze's where nobody has chosen otherwise, or takes that back."""
        raise NotImplementedError


class Known:
    """The settings that patches have made, by the object that has the attribute."""

    def __init__(self, make):
        self.make, self.found = make, weakref.WeakValueDictionary()  # by id: a setting keeps its object alive

    def __contains__(self, owner):
        return id(owner) in self.found

    def get(self, owner):
        """The setting of an object, or None; that of a copy is none."""
        return self.found.get(id(owner))

    def add(self, owner, handle, wanted, over):
        """A patch that does not want the attribute counts where an earlier one does. Without `over` it replaces the
        earlier ones. Returns the setting, or None where there is nothing to change."""
        setting = self.found.get(id(owner))
        if setting is None:
            if not wanted:
                return None
            self.found[id(owner)] = setting = self.make(owner)
        if not over:
            setting.layers = []
        setting.layers.append((handle, wanted))
        return setting


class Settings:
    """Those of one patch, as its handle has them. describe(settings): a sentence for the report."""

    def __init__(self, handle, settings, describe):
        self.handle, self.settings, self.describe = handle, settings, describe

    def settle(self):
        for setting in self.settings:
            setting.settle()

    def leave(self):
        for setting in self.settings:
            setting.layers = [layer for layer in setting.layers if layer[0] is not self.handle]
            setting.settle()

    def sentence(self):
        """What a report says of those that the patch wants; None if it wants none."""
        mine = [setting for setting in self.settings if (self.handle, True) in setting.layers]
        return self.describe(mine) if mine else None
