# Builds a backend's memory driver (driver.h): the library `_driver` beside the package's Python files, where hardpoint.memory.driver_file finds it.
#
#   include(<what hardpoint.memory.include_dir() returns>/hardpoint/driver.cmake)
#   hardpoint_add_driver(<package> <source>...)
#
# Further options of the target are the caller's. With -DHARDPOINT_SANITIZE=<list>, targets made after the include are instrumented.

set(HARDPOINT_SANITIZE "" CACHE STRING "Sanitizers of a test build, such as address,undefined")
if(HARDPOINT_SANITIZE)
  # Not optimised: -O1, which the sanitizers' manuals advise, takes the compiler twice as long, three times what the tests gain by it. Nor are
  # there lines for the debugger, up to an eighth of its time: a library that is not stripped has the names of functions.
  add_compile_options(-fsanitize=${HARDPOINT_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -O0)
  add_link_options(-fsanitize=${HARDPOINT_SANITIZE})
endif()

# hardpoint_add_bindings(<target> <source>...): what makes Python see the module `target`, as one unit. Most of what the compiler does for a file
# with bindings is pybind11's own code, once for each unit. At -O1 it takes two thirds of the time that it takes at -O3, and a call up to an eighth
# more, at most 34 ns. Sanitizers double it; a tenth less where calls such as std::move are none, as they are in builds that are optimised, and where
# the address of an access is checked by a call: the same check, in code that seldom runs.
function(hardpoint_add_bindings target)
  set(unit ${CMAKE_CURRENT_BINARY_DIR}/bindings.cpp)
  list(TRANSFORM ARGN REPLACE "(.+)" "#include \"\\1\"\n" OUTPUT_VARIABLE includes)
  string(JOIN "" text ${includes})
  file(CONFIGURE OUTPUT ${unit} CONTENT "${text}" @ONLY)
  if(NOT HARDPOINT_SANITIZE)
    set_source_files_properties(${unit} PROPERTIES COMPILE_OPTIONS "$<$<CONFIG:Release>:-O1>")
  elseif(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 12)
    set_source_files_properties(${unit} PROPERTIES
      COMPILE_OPTIONS "-ffold-simple-inlines;--param=asan-instrumentation-with-call-threshold=0")
  endif()
  target_sources(${target} PRIVATE ${unit})
endfunction()

# A plain library with C symbols, independent of Python: the core opens it, and torch's allocators may.
function(hardpoint_add_driver package)
  add_library(_driver MODULE ${ARGN})
  set_target_properties(_driver PROPERTIES
    PREFIX ""
    CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON
    C_VISIBILITY_PRESET hidden CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  target_include_directories(_driver PRIVATE ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/..)
  target_compile_options(_driver PRIVATE -Wall -Wextra)
  target_link_libraries(_driver PRIVATE ${CMAKE_DL_LIBS})
  install(TARGETS _driver DESTINATION ${package} COMPONENT driver)
endfunction()
