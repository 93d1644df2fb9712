# project.mk - builds a project of ops against an installed adze: the project's Makefile sets NAME and ADZE (the prefix
# of the installation) and includes this file. build.mk, next to it, has the flags that adze itself was built with.
SHARE := $(ADZE)/share/adze
include $(SHARE)/build.mk
B      ?= build
CFLAGS ?= -O2 -g
Q      := $(if $(V),,@)
NVCC   ?= $(firstword $(foreach c,nvcc /usr/local/cuda/bin/nvcc,$(shell command -v $c)))
CUDA   ?= $(if $(NVCC),$(ADZE_CUDA),0)
INCLUDE := -include ops.h -I. -I$(ADZE)/include -I$(ADZE)/include/adze -I$(ADZE)/include/adze/cuda \
           -I$(ADZE)/include/adze/check -DADZE_CUDA=$(CUDA)
GENCODE = $(foreach a,$(if $(filter %_sm90.cu,$<),90a,$(CUDA_ARCHS)),-gencode arch=compute_$a,code=sm_$a) \
          $(foreach a,$(if $(filter %_sm90.cu,$<),,$(CUDA_PTX)),-gencode arch=compute_$a,code=compute_$a)
OPS    := $(patsubst %.c,$(B)/%.o,$(wildcard src/ops/*.c)) \
          $(foreach s,$(filter-out $(foreach i,$(ONLY.all),src/cpu/%_$i),$(basename $(wildcard src/cpu/*.c))),\
            $(B)/$s.o $(foreach i,$(ISAS),$(B)/$s.$i.o)) \
          $(foreach i,$(ONLY),$(patsubst %.c,$(B)/%.o,$(wildcard src/cpu/*_$i.c))) \
          $(if $(filter 1,$(CUDA)),$(patsubst %,$(B)/%.o,$(wildcard src/cuda/*.cu))) $(B)/op_list.o
CHECKS := $(patsubst %.c,$(B)/%.o,$(wildcard check/*.c)) $(B)/suite.o

all: $(B)/$(NAME)
# The project's own tables of ops and cases come first, so that the linker leaves out those of adze.
$(B)/$(NAME): $(OPS) $(CHECKS)
	@echo "  LD    $@"
	$(Q)$(CC) $(LDFLAGS) $^ $(ADZE)/lib/libadze_cli.a $(ADZE)/lib/libadze_check.a $(ADZE)/lib/libadze.a -o $@ $(LIBS)
# The ops as a library, and a kernel repository for the Hugging Face Hub made of it (hub/pack.py, `adze pack`).
# `make package B=build-cpu CUDA=0` adds the variant for a torch without CUDA.
PYTHON ?= python3
$(B)/lib$(NAME).a: $(OPS)
	@rm -f $@
	$(Q)$(AR) qcs $@ $^
package: $(B)/lib$(NAME).a
	$(Q)$(PYTHON) $(SHARE)/hub/pack.py package --project . --name $(NAME) --arch $(ARCH) --ld "$(CC)" \
	  --lib $(abspath $<) $(ADZE)/lib/libadze.a --libs "$(LIBS) -ldl" --repo-id "$(HUB_REPO)" \
	  --cc "$(CC) $(CFLAGS) $(filter-out -MMD -MP,$(ADZE_CFLAGS)) $(INCLUDE)" --archs "$(CUDA_ARCHS)" --ptx "$(CUDA_PTX)" \
	  --cuda "$(if $(filter 1,$(CUDA)),$(shell $(NVCC) --version | sed -n 's/.*release \([0-9]*\)\.\([0-9]*\),.*/\1\2/p'))"
$(B)/op_list.o: $(SHARE)/src/op_list.c
$(B)/suite.o: $(SHARE)/check/suite.c
$(B)/suite.o: INCLUDE += -DADZE_PROGRAM='"$(B)/$(NAME)"'
compile = $(CC) $(CFLAGS) $(ADZE_CFLAGS) $(INCLUDE)
$(B)/op_list.o $(B)/suite.o: ops.h Makefile
	@mkdir -p $(@D)
	$(Q)$(compile) -c $(filter %.c,$^) -o $@
$(B)/src/cpu/%.o: src/cpu/%.c Makefile
	@mkdir -p $(@D)
	@echo "  CC    $<"
	$(Q)$(compile) $(CPU_CFLAGS) -DADZE_ISA= -c $< -o $@
define isa_rule
$(B)/src/cpu/%.$(1).o: src/cpu/%.c Makefile
	@mkdir -p $$(@D)
	@echo "  CC    $$< ($(1))"
	$$(Q)$$(compile) $$(CPU_CFLAGS) -DADZE_ISA=_$(1) $$(FLAGS.$(1)) -c $$< -o $$@
endef
$(foreach i,$(ISAS),$(eval $(call isa_rule,$i)))
define only_rule
$(B)/src/cpu/%_$(1).o: src/cpu/%_$(1).c Makefile
	@mkdir -p $$(@D)
	@echo "  CC    $$<"
	$$(Q)$$(compile) $$(CPU_CFLAGS) -DADZE_ISA=_$(1) $$(FLAGS.$(1)) -c $$< -o $$@
endef
$(foreach i,$(ONLY),$(eval $(call only_rule,$i)))
$(B)/%.cu.o: %.cu Makefile
	@mkdir -p $(@D)
	@echo "  NVCC  $<"
	$(Q)$(NVCC) $(NVFLAGS) $(GENCODE) $(INCLUDE) -MD -MP -MF $(@:.o=.d) -c $< -o $@
$(B)/%.o: %.c Makefile
	@mkdir -p $(@D)
	@echo "  CC    $<"
	$(Q)$(compile) -c $< -o $@

check: $(B)/$(NAME)
	$< check $(CHECK)
bench: $(B)/$(NAME)
	$< bench
clean:
	rm -rf $(B) build-cpu package
.DEFAULT_GOAL := all
.PHONY: all check bench package clean
-include $(shell find $(B) -name '*.d' 2>/dev/null)
