# adze: `make` builds for what this machine has; nvcc is used when it is found.
#   make            libadze.so, libadze.a, the program        make CUDA=0         without CUDA
#   make run        build, then a short benchmark             make CUDA_ARCHS="80 90a"
#   make test       everything that can be tested here        make fat            every GPU architecture
#   make check      kernels against their definitions         make check SAN=1    with sanitizers
B    ?= build
NVCC ?= $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
CUDA ?= $(if $(NVCC),1,0)
Q    := $(if $(V),,@)
ARCH := $(shell $(CC) -dumpmachine | cut -d- -f1)

WARN := -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla -Werror
CFLAGS ?= -O2 -g
ADZE_CFLAGS := -std=c11 -D_GNU_SOURCE $(WARN) -fvisibility=hidden -fPIC -pthread -MMD -MP \
               -Iinclude -Isrc -DADZE_CUDA=$(CUDA)
ifdef SAN
B := build/san
ADZE_CFLAGS += -fsanitize=address,undefined -fno-sanitize-recover=all
LDFLAGS += -fsanitize=address,undefined
endif

# Each file in src/cpu is compiled once per ISA. -ffp-contract=fast lets a * b + c be one instruction; vectors are
# passed between inlined functions only, so -Wpsabi has nothing to say.
ISAS.aarch64 := sve
ISAS.x86_64  := avx2 avx512
FLAGS.sve    := -march=armv8.2-a+sve
FLAGS.avx2   := -march=x86-64-v3
FLAGS.avx512 := -march=x86-64-v4 -mprefer-vector-width=512
CPU_CFLAGS   := -O3 -Wno-psabi -fno-math-errno -ffp-contract=fast

# GPU architectures: `make` takes the GPU it finds, or 90a; `make fat` takes all.
ALL_ARCHS  := 75 80 86 87 89 90a 100 110 120
PTX_ARCHS  := 80 120
FOUND_ARCH := $(if $(filter 1,$(CUDA)),$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | sed 's/^90$$/90a/' | sort -u))
CUDA_ARCHS ?= $(or $(FOUND_ARCH),90a)
GENCODE     = $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$a,code=sm_$a) \
              $(foreach a,$(CUDA_PTX),-gencode arch=compute_$a,code=compute_$a)
NVFLAGS    += -std=c++17 -O3 -lineinfo --threads 2 -Werror all-warnings -Xptxas -warn-spills \
              -Xcompiler -fPIC,-Wall,-Wextra,-Wno-unused-parameter,-fvisibility=hidden,-fno-threadsafe-statics,-fno-exceptions,-fno-rtti \
              -Iinclude -Isrc -DADZE_CUDA=1

CORE := $(patsubst %.c,$(B)/%.o,$(wildcard src/*.c src/ops/*.c))
CPU  := $(foreach s,$(wildcard src/cpu/*.c),$(B)/$(s:.c=.o) $(foreach i,$(ISAS.$(ARCH)),$(B)/$(s:.c=.$i.o)))
GPU  := $(if $(filter 1,$(CUDA)),$(patsubst %.cu,$(B)/%.cu.o,$(wildcard src/cuda/*.cu)))
LIB  := $(CORE) $(CPU) $(GPU)
HARNESS := $(patsubst %.c,$(B)/%.o,$(wildcard check/*.c))
CLI     := $(patsubst %.c,$(B)/%.o,$(wildcard cli/*.c))

VERSION := $(shell sed -n 's/^.define ADZE_VERSION \([0-9]*\).*/\1/p' include/adze.h)
LIBS    := -lm -pthread
ifeq ($(CUDA),1)
CUDA_DIR    ?= $(firstword $(wildcard $(patsubst %/bin/nvcc,%,$(shell readlink -f $$(command -v $(firstword $(NVCC))))) /usr/local/cuda))
CUDA_LIBDIR ?= $(CUDA_DIR)/lib64
CUDA_INC    ?= -isystem $(CUDA_DIR)/include
LIBS += -L$(CUDA_LIBDIR) -lcudart_static -ldl -lrt
endif

all: $(B)/libadze.so $(B)/libadze.a $(B)/adze

$(B)/libadze.a: $(LIB)
	@rm -f $@
	$(Q)$(AR) qcs $@ $^
$(B)/libadze.so: $(LIB)
	@echo "  LD    $@"
	$(Q)$(CC) -shared -Wl,-soname,libadze.so.0 -Wl,--exclude-libs,ALL $(LDFLAGS) $^ -o $@ $(LIBS)
	@ln -sf libadze.so $(B)/libadze.so.0
$(B)/libadze_check.a: $(HARNESS)
	@rm -f $@
	$(Q)$(AR) qcs $@ $^
$(B)/adze: $(CLI) $(B)/libadze_check.a $(B)/libadze.a
	@echo "  LD    $@"
	$(Q)$(CC) $(LDFLAGS) $^ -o $@ $(LIBS)

check: $(B)/adze
	$< check

$(B)/%.cu.o: %.cu
	@mkdir -p $(@D)
	@echo "  NVCC  $<"
	$(Q)$(NVCC) $(NVFLAGS) $(GENCODE) -MD -MF $(@:.o=.d) -c $< -o $@
$(B)/src/cpu/%.o: src/cpu/%.c
	@mkdir -p $(@D)
	@echo "  CC    $<"
	$(Q)$(CC) $(CFLAGS) $(ADZE_CFLAGS) $(CPU_CFLAGS) -DADZE_ISA= -c $< -o $@
define isa_rule
$(B)/src/cpu/%.$(1).o: src/cpu/%.c
	@mkdir -p $$(@D)
	@echo "  CC    $$< ($(1))"
	$$(Q)$$(CC) $$(CFLAGS) $$(ADZE_CFLAGS) $$(CPU_CFLAGS) -DADZE_ISA=_$(1) $$(FLAGS.$(1)) -c $$< -o $$@
endef
$(foreach i,$(ISAS.$(ARCH)),$(eval $(call isa_rule,$i)))
$(B)/%.o: %.c
	@mkdir -p $(@D)
	@echo "  CC    $<"
	$(Q)$(CC) $(CFLAGS) $(ADZE_CFLAGS) -Icheck -Icli $(CUDA_INC) -c $< -o $@

clean:
	rm -rf build
.PHONY: all check clean
-include $(shell find $(B) -name '*.d' 2>/dev/null)
