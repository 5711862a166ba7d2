# The file of expectations that number_golden_test reads: CTest makes it first, where a Python
# with numpy and ml_dtypes is found (-DPython3_EXECUTABLE, the project's .venv, python3). Without one
# the test is registered and says that it was skipped.
if(NOT FERRY_TESTS OR CMAKE_CROSSCOMPILING)
  return()
endif()
set(golden_python "")
foreach(candidate "${Python3_EXECUTABLE}" "${Python_EXECUTABLE}"
        "${PROJECT_SOURCE_DIR}/.venv/bin/python" python3)
  if(candidate AND NOT golden_python)
    execute_process(COMMAND "${candidate}" -c "import numpy, ml_dtypes"
      RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
    if(failed STREQUAL "0")
      set(golden_python "${candidate}")
    endif()
  endif()
endforeach()

if(golden_python)
  message(STATUS "Number formats: compared with ml_dtypes of ${golden_python}")
  set(golden_file "${CMAKE_CURRENT_BINARY_DIR}/number_golden.bin")
  add_test(NAME number_golden_make COMMAND "${golden_python}"
    "${PROJECT_SOURCE_DIR}/tests/golden/make_number_golden.py" "${golden_file}")
  set_tests_properties(number_golden_make PROPERTIES
    FIXTURES_SETUP number_golden LABELS core TIMEOUT 60)
  set_tests_properties(number_golden_test PROPERTIES
    FIXTURES_REQUIRED number_golden ENVIRONMENT "FERRY_NUMBER_GOLDEN=${golden_file}")
else()
  message(STATUS "Number formats: no Python with numpy and ml_dtypes; number_golden_test will skip")
  set_tests_properties(number_golden_test PROPERTIES SKIP_REGULAR_EXPRESSION "NOT COMPARED")
endif()
