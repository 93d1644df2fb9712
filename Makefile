# adze: `make` builds for what this machine has; nvcc is used when it is found.
#   make              libadze.so, libadze.a, the program     make CUDA=0          without CUDA
#   make run          build, then a short benchmark          make CUDA_ARCHS="80 90a"
#   make test         everything that can be tested here     make fat             every GPU architecture
#   make check        kernels against their definitions      make check SAN=1     with sanitizers (SAN=thread: threads)
#   make lint format  as the names say                       make install         what was built: PREFIX, DESTDIR
#   make python       the native part of python/adze         make wheel           dist/*.whl, for glibc 2.28 and newer
#   make LINEINFO=1   CUDA code with line numbers            make CUDA_OPT=0      CUDA code that is not optimised
#   make docs         docs/ops.md and the Python constants, from include/adze.h
#   make site         build/site, these documents as pages with pictures of recorded runs (mkdocs)
#   make hub          a kernel repository, in build/hub/adze  (HUB=folder, HUB_REPO=organisation/name)
B       ?= build$(if $(SAN),/$(if $(filter thread,$(SAN)),tsan,san))
PREFIX  ?= /usr/local
CFLAGS  ?= $(if $(SAN),-O1,-O2) -g
Q       := $(if $(V),,@)
comma   := ,
found    = $(firstword $(foreach c,$1,$(shell command -v $c)))
ifeq ($(origin CC),default)
CC      := $(notdir $(call found,cc gcc clang))
endif
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell nproc 2>/dev/null || echo 2)
endif
ARCH    := $(shell $(CC) -dumpmachine | cut -d- -f1)
VERSION := $(shell awk '/define ADZE_VERSION / {printf "%d.%d.%d", $$3 / 10000, $$3 / 100 % 100, $$3 % 100}' include/adze.h)
SONAME  := libadze.so.$(firstword $(subst ., ,$(VERSION)))
COMMIT  := $(or $(shell git describe --always --dirty --abbrev=12 --exclude='*' 2>/dev/null),unknown)

# nvcc needs a C++ compiler on the host. It says itself where its headers and libraries are. Sanitizers watch the host.
NVCC    ?= $(call found,nvcc /usr/local/cuda/bin/nvcc)
HOSTCXX := $(call found,g++ clang++)
CUDA    ?= $(if $(and $(NVCC),$(HOSTCXX),$(if $(SAN),,1)),1,0)

WARN := -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla -Werror
ADZE_CFLAGS := -std=c11 -D_GNU_SOURCE $(WARN) -fvisibility=hidden -fPIC -pthread -MMD -MP \
               -Iinclude -Isrc -DADZE_CUDA=$(CUDA)
LIBS := -lm -pthread
# The CPU's kernels are the same with CUDA and without: K is the folder of a build whose kernels this one takes, as that
# build has them (SAN_KERNELS: this build's own, with sanitizers).
K       ?= $(B)
SAN_KERNELS := $(if $(filter $(B),$(K)),$(SAN))
ifdef SAN
SANITIZERS  := $(if $(filter thread,$(SAN)),-fsanitize=thread,-fsanitize=address -fsanitize=undefined)
WATCH       := $(SANITIZERS) -fno-sanitize-recover=all
LDFLAGS     += $(SANITIZERS)
else
SO_LDFLAGS  := -Wl,-z,defs -Wl,--version-script=src/exports.map
endif

# Each file in src/cpu is compiled once per ISA. -ffp-contract=fast lets a * b + c be one instruction; vectors are
# passed between inlined functions only, so -Wpsabi has nothing to say. Their long functions take a while to compile with
# sanitizers: what two find, one looks for, and AddressSanitizer is called rather than inlined. A kernel's stack frame is
# at most 32 KiB: the host's threads may have small stacks. Sanitizers make frames larger.
#
# An ISA that few ops gain by is one of ONLY: src/cpu/<op>_<isa>.c is compiled for it alone, and where there is one.
ISAS.aarch64 := sve
ISAS.x86_64  := avx2 avx512
ONLY.aarch64 := bf16
ONLY.x86_64  := amx amx_int8 vnni
ONLY.all     := bf16 amx amx_int8 vnni
FLAGS.sve    := -march=armv8.2-a+sve
FLAGS.bf16   := -march=armv8.2-a+bf16
FLAGS.avx2   := -march=x86-64-v3
FLAGS.avx512 := -march=x86-64-v4 -mprefer-vector-width=512
FLAGS.amx    := -march=x86-64-v4 -mprefer-vector-width=512 -mamx-tile -mamx-bf16
FLAGS.amx_int8 := -march=x86-64-v4 -mprefer-vector-width=512 -mavx512vnni -mamx-tile -mamx-int8
FLAGS.vnni   := -march=x86-64-v4 -mprefer-vector-width=512 -mavx512vnni
CPUINFO.sve    := sve
CPUINFO.bf16   := bf16
CPUINFO.avx2   := avx2
CPUINFO.avx512 := avx512vl
CPUINFO.amx    := amx_bf16
CPUINFO.amx_int8 := amx_int8
CPUINFO.vnni   := avx512_vnni
# Of the ISAs only the widest that this processor has is watched, besides the kernels for any processor: compiling them
# takes most of the time. UndefinedBehaviorSanitizer, which takes more of it, watches the latter alone. PLAIN is the folder
# of a build that the others are taken from, and so are TWINS, which read and write nothing that layer_norm and
# qk_norm_rope, of the same headers, do not.
PLAIN        ?= $(K)
TWINS        := $(if $(SAN_KERNELS),rms_norm rope)
WATCHED_ISA  := $(if $(SAN_KERNELS),$(lastword $(foreach i,$(ISAS.$(ARCH)),$(if $(shell grep -w $(CPUINFO.$i) /proc/cpuinfo),$i))))
UNWATCHED     = $(if $(SAN_KERNELS),$(if $(filter $(WATCHED_ISA),$1),$(if $(filter-out thread,$(SAN)),\
                -fno-sanitize=undefined),-fno-sanitize=all))
SAN_CFLAGS    = -O1 $(if $(filter-out thread,$(SAN)),-fno-sanitize=null$(comma)object-size$(comma)pointer-overflow \
                $(if $(shell $(CC) --version | grep clang),-mllvm -asan,--param asan)-instrumentation-with-call-threshold=0)
CPU_OPT      ?= -O3
CPU_CFLAGS   := $(if $(SAN_KERNELS),$(SAN_CFLAGS),$(CPU_OPT)) -g1 -Wno-psabi -fno-math-errno -ffp-contract=fast \
                $(if $(SAN_KERNELS),,-Wframe-larger-than=32768)

# GPU architectures: `make` takes the GPUs it finds, or 90a; `make fat` takes all that nvcc knows. *_sm90.cu is for 90a.
# A GPU runs the code of an earlier minor version of its own, so that PTX is for later major versions alone.
ifeq ($(CUDA),1)
NVCC_HOST  := $(if $(filter clang++,$(notdir $(HOSTCXX))),-ccbin $(HOSTCXX) -Xcompiler -Wno-unused-function)
CUDA_SAYS  := $(shell echo | $(NVCC) $(NVCC_HOST) --dryrun -x cu -c - 2>&1 | sed -n -E 's/^.{3}(INCLUDES|LIBRARIES)=//p' | tr -d '"')
CUDA_INC   := $(patsubst -I%,-isystem %,$(filter -I%,$(CUDA_SAYS)))
LIBS       += $(filter -L%,$(CUDA_SAYS)) -lcudart_static -ldl -lrt
KNOWN_ARCHS = $(subst sm_,,$(shell $(NVCC) --list-gpu-code))
ALL_ARCHS   = $(filter $(KNOWN_ARCHS) $(if $(filter 90,$(KNOWN_ARCHS)),90a),75 80 86 87 89 90a 100 110 120)
PTX_ARCHS   = $(lastword $(foreach a,80 90 120,$(filter $a,$(KNOWN_ARCHS))))
FOUND_ARCHS := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
                       sed -n -E 's/^([0-9]+)\.([0-9])$$/\1\2/p' | sed 's/^90$$/90a/' | sort -u)
CUDA_ARCHS ?= $(or $(FOUND_ARCHS),90a)
GENCODE     = $(foreach a,$(if $(filter %_sm90.cu,$<),90a,$(CUDA_ARCHS)),-gencode arch=compute_$a,code=sm_$a) \
              $(foreach a,$(if $(filter %_sm90.cu,$<),,$(CUDA_PTX)),-gencode arch=compute_$a,code=compute_$a)
# Machine code is stored compressed, and without line numbers unless LINEINFO=1 asks for them (ncu, compute-sanitizer).
# Finding the smallest size is an eighth of the work of a build that is not optimised, which takes nvcc's own way instead.
NVCC_HELP  := $(shell $(NVCC) --help)
COMPRESS    = $(if $(and $(OPTIMISED),$(findstring --compress-mode,$(NVCC_HELP))),--compress-mode=size,-Xfatbin -compress-all)
# CUDA_OPT=0 compiles sooner, for tests on a machine that has no GPU: neither the GPU's code nor the host's is optimised,
# and spills are no error. ptxas then has a line for each function with wgmma, and no option for silence.
CUDA_OPT   ?= 1
OPTIMISED  := $(if $(and $(filter 0,$(CUDA_OPT)),$(findstring --Ofast-compile,$(NVCC_HELP))),,1)
NVCC_SAYS   = $(if $(OPTIMISED),,2>$@.said; status=$$?; grep -v 'Potential Performance Loss' $@.said >&2; \
              rm -f $@.said; exit $$status)
# Host code launches kernels, of which there are thousands: it is compiled for size, but where it compares ways to divide a
# product. nvcc's own -O is for host code alone, and would come after these.
HOST_OPT    = $(if $(filter src/cuda/gemm.cu src/cuda/gemm_shifted.cu src/cuda/gemm_swapped_sm90.cu,$<),-O2,-Os)
# A spill is an error where kernels are tuned, on sm_90. For other GPUs it costs some time, and must not stop a build.
SPILLS      = $(if $(filter-out 90a,$(CUDA_ARCHS)),,-Xptxas -warn-spills$(comma)-warn-lmem-usage)
NVFLAGS    += -std=c++17 $(if $(OPTIMISED),-Xcompiler $(HOST_OPT) $(SPILLS),-O0 --Ofast-compile max) \
              $(if $(LINEINFO),-lineinfo) $(COMPRESS) --threads 2 -Werror all-warnings \
              -Xcompiler -fPIC,-Wall,-Wextra $(NVCC_HOST) \
              -Xcompiler -Wno-unused-parameter,-fvisibility=hidden,-fno-threadsafe-statics,-fno-exceptions,-fno-rtti \
              -Iinclude -Isrc -Icheck -DADZE_CUDA=1
endif

KERNEL_CFLAGS = $(CFLAGS) $(filter-out -DADZE_CUDA=%,$(ADZE_CFLAGS)) $(if $(SAN_KERNELS),$(WATCH)) $(CPU_CFLAGS)

# The folders are the lists. A library has several objects of one name, hence `ar q`. place: the folder of a kernel's build.
objects  = $(patsubst %.c,$(B)/%.o,$(wildcard $(1:=/*.c))) \
           $(if $(filter 1,$(CUDA)),$(patsubst %,$(B)/%.o,$(wildcard $(1:=/*.cu))))
place    = $(if $(filter $(TWINS:%=src/cpu/%),$1),$(PLAIN),$(K))
CPU     := $(foreach s,$(filter-out $(foreach i,$(ONLY.all),src/cpu/%_$i),$(basename $(wildcard src/cpu/*.c))),$(call place,$s)/$s.o \
             $(foreach i,$(ISAS.$(ARCH)),$(if $(filter $i,$(WATCHED_ISA)),$(call place,$s),$(PLAIN))/$s.$i.o)) \
           $(foreach i,$(ONLY.$(ARCH)),$(patsubst %.c,$(if $(SAN_KERNELS),$(PLAIN),$(K))/%.o,$(wildcard src/cpu/*_$i.c)))
LIB     := $(call objects,src src/ops src/cuda) $(CPU)
HARNESS := $(call objects,check)
CLI     := $(call objects,cli)
SO      := $(B)/libadze.so.$(VERSION)

all: $(B)/libadze.so $(B)/libadze.a $(B)/adze $(B)/adze.pc $(B)/libadze_cli.a $(B)/build.mk

$(B)/libadze.a $(B)/libadze_check.a $(B)/libadze_cli.a: $(B)/objects
	@rm -f $@
	$(Q)$(AR) qcs $@ $(filter %.o,$^)
$(B)/libadze.a: $(LIB)
$(B)/libadze_check.a: $(HARNESS)
$(B)/libadze_cli.a: $(CLI)
$(SO): $(LIB) $(B)/objects src/exports.map
	@echo "  LD    $@"
	$(Q)$(CC) -shared -Wl,-soname,$(SONAME) -Wl,--exclude-libs,ALL $(SO_LDFLAGS) $(LDFLAGS) $(LIB) -o $@ $(LIBS)
$(B)/libadze.so: $(SO)
	@ln -sf $(<F) $(B)/$(SONAME) && ln -sf $(SONAME) $@
$(B)/adze: $(CLI) $(B)/libadze_check.a $(B)/libadze.a
	@echo "  LD    $@"
	$(Q)$(CC) $(LDFLAGS) $^ -o $@ $(LIBS)
# The Python package's native part: the static library and the bindings, with nothing of Python or torch on the line.
# bind/ is compiled with -fexceptions: torch's errors pass through it. A wheel for others is linked by PY_LD, against an
# older libc than this machine's.
BIND    := $(call objects,bind)
EXT     := $(B)/_adze.abi3.so
PY_LD   ?= $(CC)
$(BIND): ADZE_CFLAGS += -fexceptions
$(EXT): $(BIND) $(B)/libadze.a bind/exports.map $(B)/linker
	@echo "  LD    $@"
	$(Q)$(PY_LD) -shared $(if $(SAN),,-s) -Wl,--version-script=bind/exports.map $(LDFLAGS) $(BIND) $(B)/libadze.a -o $@ $(LIBS) -ldl
python: $(EXT) $(B)/bundle
	@cmp -s $(B)/bundle python/adze/bundle || cp $(B)/bundle python/adze/bundle
	@cmp -s $< python/adze/operators/$(<F) || { cp $< python/adze/operators/.new.so && mv python/adze/operators/.new.so python/adze/operators/$(<F); }
wheel:
	python3 -m venv $(B)/wheel && $(B)/wheel/bin/pip install -q ziglang
	PY_LD="$$($(B)/wheel/bin/python -c 'import ziglang; print(ziglang.__path__[0])')/zig cc -target $(ARCH)-linux-gnu.2.28" \
	  ADZE_WHEEL=manylinux_2_28_$(ARCH) $(B)/wheel/bin/pip wheel -q --no-deps -w dist .
# A kernel repository of the Hugging Face Hub: the variants of a backend from its own library, each time with all sources.
HUB     ?= build/hub/adze
HUB_ARCHS ?= $(ALL_ARCHS)
export HUB_PY ?= $(firstword $(wildcard $(B)/wheel/bin/python) python3)
hub:
	$(MAKE) B=$(B)/hub-cpu CUDA=0 hub-backend
	$(if $(filter 1,$(CUDA)),$(MAKE) B=$(B)/hub-cuda CUDA_ARCHS="$(HUB_ARCHS)" CUDA_PTX="$(PTX_ARCHS)" hub-backend)
hub-backend: $(B)/libadze.a
	$(Q)$(HUB_PY) hub/pack.py $(HUB) --lib $< --arch $(ARCH) --ld "$(PY_LD)" --libs "$(LIBS) -ldl" \
	  --cc "$(CC) $(CFLAGS) $(filter-out -MMD -MP,$(ADZE_CFLAGS))" --repo-id "$(HUB_REPO)" --archs "$(CUDA_ARCHS)" \
	  --ptx "$(CUDA_PTX)" --cuda "$(if $(filter 1,$(CUDA)),$(shell $(NVCC) --version | sed -n 's/.*release \([0-9]*\)\.\([0-9]*\),.*/\1\2/p'))"
# What a project's Makefile (templates/project.mk) must know of this build.
define BUILD_MK
ARCH := $(ARCH)
ISAS := $(ISAS.$(ARCH))
ONLY := $(ONLY.$(ARCH))
ONLY.all := $(ONLY.all)
$(foreach i,$(ISAS.$(ARCH)) $(ONLY.$(ARCH)),FLAGS.$i := $(FLAGS.$i)
)ADZE_CUDA := $(CUDA)
ADZE_CFLAGS := -std=c11 -D_GNU_SOURCE $(WARN) -fvisibility=hidden -fPIC -pthread -MMD -MP
CPU_CFLAGS := $(CPU_CFLAGS)
NVFLAGS := $(filter-out -I%,$(NVFLAGS))
ADZE_OPTIMISED := $(if $(filter 0,$(CUDA))$(LIB_OPTIMISED),1,0)
CUDA_ARCHS ?= $(CUDA_ARCHS)
CUDA_PTX ?= $(CUDA_PTX)
LIBS := $(LIBS)
endef
# A project's kernels are optimised, also where this library's are not.
LIB_OPTIMISED := $(OPTIMISED)
$(B)/build.mk: OPTIMISED := 1
$(B)/build.mk: $(B)/flags Makefile
	$(file >$@,$(BUILD_MK))@:
$(B)/adze.pc: adze.pc.in $(B)/flags
	@sed 's|@VERSION@|$(VERSION)|; s|@LIBS@|$(LIBS)|' $< > $@

CUDA_CODE   = $(strip $(CUDA_ARCHS:%=sm_%) $(if $(CUDA_PTX),and PTX of $(CUDA_PTX:%=compute_%)) $(if $(filter 0,$(CUDA))$(OPTIMISED),,(not optimised)))
$(B)/src/cuda/device.cu.o: NVFLAGS += -DADZE_CUDA_CODE='"$(CUDA_CODE)"'
# nvcc removes the list of headers when it fails: without it, an older object would seem to be up to date.
$(B)/%.cu.o: %.cu $(B)/flags
	@mkdir -p $(@D)
	@rm -f $@
	@echo "  NVCC  $<"
	$(Q)$(NVCC) $(NVFLAGS) $(GENCODE) -MD -MP -MF $(@:.o=.d) -c $< -o $@ $(NVCC_SAYS)
$(K)/src/cpu/%.o: src/cpu/%.c $(K)/kernel_flags
	@mkdir -p $(@D)
	@echo "  CC    $<"
	$(Q)$(CC) $(KERNEL_CFLAGS) -DADZE_ISA= -c $< -o $@
define isa_rule
$(K)/src/cpu/%.$(1).o: src/cpu/%.c $(K)/kernel_flags
	@mkdir -p $$(@D)
	@echo "  CC    $$< ($(1))"
	$$(Q)$$(CC) $$(KERNEL_CFLAGS) -DADZE_ISA=_$(1) $$(FLAGS.$(1)) $(call UNWATCHED,$1) -c $$< -o $$@
endef
$(foreach i,$(ISAS.$(ARCH)),$(eval $(call isa_rule,$i)))
define only_rule
$(K)/src/cpu/%_$(1).o: src/cpu/%_$(1).c $(K)/kernel_flags
	@mkdir -p $$(@D)
	@echo "  CC    $$<"
	$$(Q)$$(CC) $$(KERNEL_CFLAGS) -DADZE_ISA=_$(1) $$(FLAGS.$(1)) $(call UNWATCHED,$1) -c $$< -o $$@
endef
$(foreach i,$(ONLY.$(ARCH)),$(eval $(call only_rule,$i)))
$(B)/%.o: %.c $(B)/flags
	@mkdir -p $(@D)
	@echo "  CC    $<"
	$(Q)$(CC) $(CFLAGS) $(ADZE_CFLAGS) $(WATCH) -Icheck -Icli -Ibind $(CUDA_INC) $(DEFINE) -c $< -o $@
# The program carries the templates, the sources that new ops are made from, and the skills (cli/bundle.sh).
BUNDLED := $(filter-out %/__pycache__,$(wildcard templates/*/*)) $(wildcard src/ops/*.c src/cpu/*.c \
             src/cuda/*.cu) $(filter-out \
             $(wildcard $(patsubst check/%.h,check/%.c,$(wildcard check/*.h))),$(wildcard check/*.c)) include/adze.h \
           include/adze_kernel.h src/kernel.h src/value.h python/adze/operators/functions.py
SKILLS  := $(wildcard skills/*/* skills/*/*/*)
$(B)/bundle: cli/bundle.sh Makefile $(BUNDLED) $(SKILLS) $(shell cat skills/*/scripts.list) $(B)/objects
	$(Q)cli/bundle.sh $(B) $(BUNDLED) > $@.new && mv $@.new $@
$(B)/cli/bundle.o: DEFINE = -DADZE_BUNDLE='"$(B)/bundle"'
$(B)/cli/bundle.o: $(B)/bundle
$(B)/cli/info.o: DEFINE = -DADZE_CUDA_CODE='"$(CUDA_CODE)"'
$(B)/cli/machine.o: DEFINE = -DADZE_COMMIT='"$(COMMIT)"'
$(B)/cli/machine.o: $(B)/commit

# Files that change when their text does, so that other flags, a vanished source or a new commit rebuild what they touch.
# `make install`, often run by another user, takes what is there.
stamp = $(if $(findstring <$(strip $2)>,<$(strip $(file <$1))>),,$(file >$1,$2))
ifneq ($(filter-out clean format lint test $(if $(wildcard $(B)/adze),install),$(or $(MAKECMDGOALS),all)),)
$(shell mkdir -p '$(B)' '$(K)')
$(call stamp,$(K)/kernel_flags,$(CC) $(KERNEL_CFLAGS))
$(call stamp,$(B)/flags,$(CC) $(CFLAGS) $(ADZE_CFLAGS) $(CUDA_INC) $(LDFLAGS) $(LIBS) $(NVCC) $(NVFLAGS) \
  $(CUDA_ARCHS) $(CUDA_PTX) $(VERSION))
$(call stamp,$(B)/linker,$(PY_LD))
$(call stamp,$(B)/objects,$(LIB) $(HARNESS) $(CLI) $(BIND))
$(call stamp,$(B)/commit,$(COMMIT))
endif
$(B)/flags $(K)/kernel_flags $(B)/objects $(B)/commit $(B)/linker:

run: all
	$(B)/adze bench --html $(B)/bench.html
check: $(B)/adze
	$< check
test:
	@tests/setup.sh && tests/run.sh
lint:
	@tests/lint.sh
format:
	clang-format -i $$(git ls-files '*.[ch]' '*.cu' '*.cuh')
docs: $(B)/adze
	$< info --markdown include/adze.h > docs/ops.md
	python3 bind/header.py > $(B)/header.py && mv $(B)/header.py python/adze/operators/header.py
site:
	python3 -c 'import mkdocs' 2>/dev/null || { python3 -m venv $(B)/site-env && $(B)/site-env/bin/pip install -q mkdocs; }
	$$([ -x $(B)/site-env/bin/python ] && echo $(B)/site-env/bin/python || echo python3) docs/site.py
fat:
	$(if $(filter 1,$(CUDA)),,$(error make fat needs nvcc))$(MAKE) CUDA_ARCHS="$(ALL_ARCHS)" CUDA_PTX="$(PTX_ARCHS)" all
cuda-compile:
	$(if $(filter 1,$(CUDA)),,$(error make cuda-compile needs nvcc))$(MAKE) B=$(B)/cuda \
	  CUDA_ARCHS="$(firstword $(ALL_ARCHS)) $(lastword $(ALL_ARCHS))" cuda-objects
cuda-objects: $(filter %.cu.o,$(LIB) $(HARNESS))

# An image (DESTDIR) is for a package, whose installer calls ldconfig. Otherwise ldconfig runs here, where that is allowed.
# For a folder that the loader does not search, install prints what programs need.
I := $(DESTDIR)$(PREFIX)
LDCONFIG := $(call found,ldconfig /sbin/ldconfig /usr/sbin/ldconfig)
STRIP   ?= strip
install: $(if $(wildcard $(B)/adze),,all)
	@case '$(PREFIX)' in /*) ;; *) echo "install: PREFIX is '$(PREFIX)', it must begin with /" >&2; exit 1;; esac
	install -d "$(I)/bin" "$(I)/lib/pkgconfig" "$(I)/include/adze/ops" "$(I)/include/adze/cpu" "$(I)/include/adze/cuda" \
	  "$(I)/include/adze/check" "$(I)/share/adze/check"
	install -m 755 $(B)/adze "$(I)/bin"
	install -m 644 include/*.h "$(I)/include"
	install -m 644 $(B)/libadze.a $(B)/libadze_check.a $(B)/libadze_cli.a "$(I)/lib"
	for f in src/*.h src/ops/*.h src/cpu/*.h src/cuda/*.cuh check/suite.h check/norm.h; do \
	  { echo '/* For authors of kernels. This file may change with each release of adze. */' && cat $$f; } \
	    > "$(I)/include/adze/$${f#src/}" || exit 1; done
	install -m 644 $(B)/build.mk templates/project.mk "$(I)/share/adze"
	install -m 644 check/suite.c "$(I)/share/adze/check"
	tar -cf - --exclude=__pycache__ --exclude='*.so' include src bind hub python/adze/operators \
	  python/adze/hosts/tvm_ffi.py LICENSE Makefile | tar -xf - -C "$(I)/share/adze"
	install -m 755 $(SO) "$(I)/lib"
	-$(STRIP) --strip-unneeded "$(I)/lib/$(notdir $(SO))" "$(I)/bin/adze"
	ln -sf $(notdir $(SO)) "$(I)/lib/$(SONAME)"
	ln -sf $(SONAME) "$(I)/lib/libadze.so"
	sed 's|@PREFIX@|$(PREFIX)|; /^prefix=/s/ /\\ /g' $(B)/adze.pc > "$(I)/lib/pkgconfig/adze.pc"
	@[ -n "$(DESTDIR)" ] || [ -z "$(LDCONFIG)" ] || { [ "$$(id -u)" != 0 ] || $(LDCONFIG); \
	  $(LDCONFIG) -p | sed -n 's/^[[:space:]]*$(SONAME) .*=> //p' | { \
	    while read -r f; do [ "$$f" -ef "$(I)/lib/$(SONAME)" ] && exit; done; \
	    echo "install: the loader does not search $(PREFIX)/lib: set PKG_CONFIG_PATH=$(PREFIX)/lib/pkgconfig, and link" \
	      "programs with -Wl,-rpath,$(PREFIX)/lib too"; }; }

clean:
	rm -rf $(B)
.PHONY: all python wheel hub hub-backend run check test lint format docs site fat cuda-compile cuda-objects install clean
-include $(shell find $(B) $(K)/src/cpu -name '*.d' 2>/dev/null)
