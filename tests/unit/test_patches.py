"""Replacing names and putting them back (`hooks/patches.py`)."""

import sys
from types import ModuleType

import pytest

from verl_otel.hooks.patches import Patches


@pytest.fixture
def patches():
    return Patches()


@pytest.fixture
def module(monkeypatch):
    """Make modules that are imported, until the test is over."""

    def make(name, **names):
        found = ModuleType(name)
        vars(found).update(names)
        monkeypatch.setitem(sys.modules, name, found)
        return found

    return make


def original():
    return "original"


def replacement():
    return "replacement"


def test_a_name_of_a_module_is_replaced_and_put_back(patches, module):
    m = module("verl.a", func=original)
    patches.set(m, "func", replacement)
    assert m.func is replacement
    patches.undo()
    assert m.func is original


def test_a_name_that_was_not_there_is_gone_again(patches, module):
    m = module("verl.a")
    patches.set(m, "func", replacement)
    patches.undo()
    assert not hasattr(m, "func")


def test_an_inherited_method_is_inherited_again(patches):
    class Base:
        def run(self):
            return "base"

    class Child(Base):
        pass

    patches.set(Child, "run", lambda self: "patched")
    assert (Child().run(), Base().run()) == ("patched", "base")
    patches.undo()
    assert "run" not in vars(Child)
    Base.run = lambda self: "new base"
    assert Child().run() == "new base"


def test_a_method_of_its_own_is_put_back_on_the_class(patches):
    class Base:
        def run(self):
            return "base"

    class Child(Base):
        def run(self):
            return "child"

    before = vars(Child)["run"]
    patches.set(Child, "run", lambda self: "patched")
    patches.undo()
    assert vars(Child)["run"] is before
    assert Child().run() == "child"


def test_static_and_class_methods_are_put_back_as_such(patches):
    class Worker:
        @staticmethod
        def static():
            return "static"

        @classmethod
        def of_class(cls):
            return cls

        @property
        def prop(self):
            return "property"

    before = dict(vars(Worker))
    for name in ("static", "of_class", "prop"):
        patches.set(Worker, name, replacement)
    patches.undo()
    assert all(vars(Worker)[name] is before[name] for name in ("static", "of_class", "prop"))
    assert (Worker.static(), Worker().of_class(), Worker().prop) == ("static", Worker, "property")


def test_what_somebody_else_has_replaced_since_is_left_to_them(patches, module):
    m = module("verl.a", func=original)
    patches.set(m, "func", replacement)

    def theirs():
        return "theirs"

    m.func = theirs
    patches.undo()
    assert m.func is theirs


def test_a_name_that_somebody_else_has_deleted_stays_deleted(patches, module):
    m = module("verl.a", func=original)
    patches.set(m, "func", replacement)
    del m.func
    patches.undo()
    assert not hasattr(m, "func")


def test_whether_it_is_ours_is_told_by_identity_not_by_equality(patches, module):
    class Equal:
        def __eq__(self, other):
            return True

        __hash__ = None

    m = module("verl.a", value=original)
    theirs = Equal()
    patches.set(m, "value", Equal())
    m.value = theirs
    patches.undo()
    assert m.value is theirs


def test_a_name_that_is_replaced_twice_gets_its_first_value_back(patches, module):
    m = module("verl.a", func=original)
    patches.set(m, "func", replacement)
    patches.set(m, "func", lambda: "second")
    patches.undo()
    assert m.func is original


def test_undoing_twice_changes_nothing_more(patches, module):
    m = module("verl.a", func=original)
    patches.set(m, "func", replacement)
    patches.undo()
    m.func = replacement
    patches.undo()
    assert m.func is replacement


def test_everywhere_means_every_module_of_verl_that_has_the_same_object(patches, module):
    source = module("verl.source", func=original)
    importer = module("verl.importer", func=original)
    other_object = module("verl.other", func=lambda: "of its own")
    other_name = module("verl.renamed", renamed=original)
    elsewhere = module("verlike", func=original)
    of_its_own = other_object.func
    patches.set_everywhere(source, "func", replacement)
    assert source.func is importer.func is replacement
    assert other_object.func is of_its_own
    assert other_name.renamed is original
    assert elsewhere.func is original
    patches.undo()
    assert source.func is importer.func is original
