/* module.c - the library as a Python extension module: importing it, after torch, registers the operators. The stable
   ABI's few types are declared here, and no header of Python is needed. What else it offers is called through ctypes.
 */
#include "bind.h"

#ifndef ADZE_MODULE
#    define ADZE_MODULE _adze
#endif
#define CAT_(a, b) a##b
#define CAT(a, b)  CAT_(a, b)
#define TEXT_(x)   #x
#define TEXT(x)    TEXT_(x)

typedef struct module_definition { /* PyModuleDef of the stable ABI */
    intptr_t references;
    void *type, *init;
    intptr_t index;
    void *copy;
    const char *name, *doc;
    intptr_t size;
    void *methods, *slots, *traverse, *clear, *free;
} module_definition;

enum { PYTHON_ABI_VERSION = 3 };
extern void *PyModule_Create2(module_definition *definition, int version) __attribute__((weak));
extern void PyErr_SetString(void *type, const char *message) __attribute__((weak));
extern void *PyExc_ImportError __attribute__((weak));

ADZE_API void *CAT(PyInit_, ADZE_MODULE)(void);
void *CAT(PyInit_, ADZE_MODULE)(void)
{
    static module_definition definition = {.references = 1, .name = TEXT(ADZE_MODULE), .size = -1};
    if (!PyModule_Create2 || !PyErr_SetString)
        return NULL;
    const char *const problem = adze_torch_register();
    if (problem) {
        PyErr_SetString(PyExc_ImportError, problem);
        return NULL;
    }
    return PyModule_Create2(&definition, PYTHON_ABI_VERSION);
}

/* What the op at an index is: see bind_describe(). NULL after the last one. */
ADZE_API const char *adze_describe(int index);
const char *adze_describe(int index)
{
    return bind_describe(index);
}

/* Whether that op can run on a device at all: see bind_has_kernel(). */
ADZE_API int adze_has_kernel(int index, int device);
int adze_has_kernel(int index, int device)
{
    return bind_has_kernel(index, device);
}

/* The flags of the calls that this thread makes from now on. */
ADZE_API void adze_call_flags(uint32_t flags);
void adze_call_flags(uint32_t flags)
{
    bind_flags = flags;
}
