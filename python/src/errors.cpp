#include "errors.h"

#include <array>

namespace nb = nanobind;

namespace gatefold::python {
namespace {

/// By Code; the base class in place of `ok`. Kept for the life of the process.
std::array<PyObject*, 6> classes;

PyObject* make(nb::module_& m, const char* name, const char* doc, nb::handle bases) {
  const std::string full = std::string("gatefold.") + name;
  PyObject* made = PyErr_NewExceptionWithDoc(full.c_str(), doc, bases.ptr(), nullptr);
  if (made == nullptr) throw nb::python_error();
  m.attr(name) = nb::handle(made);
  return made;
}

}  // namespace

void add_errors(nb::module_& m) {
  PyObject* base = make(m, "Error", "What the library reports; the text is the Status's message.",
                        nb::handle(PyExc_RuntimeError));
  const auto add = [&](Code code, const char* name, const char* doc, PyObject* also) {
    const nb::object bases = also == nullptr ? nb::object(nb::make_tuple(nb::handle(base)))
                                             : nb::object(nb::make_tuple(nb::handle(base), nb::handle(also)));
    classes[static_cast<std::size_t>(code)] = make(m, name, doc, bases);
  };
  classes[static_cast<std::size_t>(Code::ok)] = base;
  add(Code::invalid_argument, "InvalidArgument",
      "An argument is wrong: shape, dtype, option, id out of range.", PyExc_ValueError);
  add(Code::bad_file, "BadFile", "A file's content is wrong or inconsistent.", PyExc_ValueError);
  add(Code::io_error, "IoError",
      "The operating system refused: missing, unreadable, out of memory, disk full.", nullptr);
  add(Code::unsupported, "Unsupported", "Well-formed, but no code here handles it.",
      PyExc_NotImplementedError);
  add(Code::internal, "InternalError", "A check of the library itself failed.", nullptr);

  nb::register_exception_translator(
      [](const std::exception_ptr& p, void*) {
        try {
          std::rethrow_exception(p);
        } catch (const StatusError& error) {
          PyErr_SetString(classes[static_cast<std::size_t>(error.status.code())],
                          error.status.message().c_str());
        }
      },
      nullptr);
}

}  // namespace gatefold::python
